#!/bin/bash
# Keeps the picker running beside Envoy, and answers the probe that finds a hanging picker.
#   keep.sh run COMMAND...   runs the command, and runs it again when it ends by itself, until SIGTERM, which is passed on
#   keep.sh alive HOST PORT  the liveness probe, which fails only if something listens and does not answer
# Kubernetes removes a pod from its Services when a sidecar of the pod has ended. But Envoy also serves without a picker. If
# pickers crashed again and again in every pod, no pod would be left in the Services. So this script starts a dead picker again
# in the same container, and the probe does not fail while the picker is away.
set -u

alive() { # HOST PORT
  local line=
  { exec 3<>"/dev/tcp/$1/$2"; } 2>/dev/null || return 0
  printf 'GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n' >&3
  IFS= read -r -t 3 line <&3
  (($? > 128)) && echo "keep.sh: the picker does not answer" >&2 && return 1
  [[ -z $line || $line == 'HTTP/1.1 200'* ]] # it may have ended meanwhile
}

run() { # COMMAND...
  local child='' first=1 stopping='' pause_s=1 began status
  trap 'stopping=1; [[ $child ]] && kill -TERM "$child"' TERM INT
  while :; do
    began=$SECONDS
    "$@" &
    child=$!
    [[ $stopping ]] && kill -TERM "$child" # SIGTERM came while it started
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` early
      wait "$child"
      status=$?
    done
    child=
    [[ $stopping ]] && return "$status"
    # The picker cannot use its configuration, and has logged the reason. After a good start this is no reason to give up.
    [[ $first && $status == 2 ]] && return 2
    first=
    ((SECONDS - began > 10)) && pause_s=1
    echo "keep.sh: the picker ended with status $status; it is started again in $pause_s s" >&2
    sleep "$pause_s" &
    child=$!
    wait "$child"
    child=
    [[ $stopping ]] && return 0
    pause_s=$((pause_s < 4 ? pause_s * 2 : 5))
  done
}

mode=$1
shift
"$mode" "$@"
