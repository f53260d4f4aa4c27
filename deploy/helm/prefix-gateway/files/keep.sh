#!/bin/bash
# Keeps the picker running beside Envoy, and tells one that hangs.
#   keep.sh run COMMAND...   runs the command, again whenever it ends by itself, until told to end; SIGTERM is passed on
#   keep.sh alive HOST PORT  the liveness probe: fails only where something listens and does not answer
# Kubernetes takes a pod whose sidecar has ended out of its Services. But Envoy serves without a picker: were pickers to crash
# again and again in every pod, nobody would be left to ask. So a picker that dies is started again here, within a container
# that lives on, and the probe does not count a picker that is not there.
set -u

alive() { # HOST PORT
  local line=
  { exec 3<>"/dev/tcp/$1/$2"; } 2>/dev/null || return 0
  printf 'GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n' >&3
  IFS= read -r -t 3 line <&3
  (($? > 128)) && echo "keep.sh: the picker does not answer" >&2 && return 1
  [[ -z $line || $line == 'HTTP/1.1 200'* ]] # it may have died over it
}

run() { # COMMAND...
  local child='' first=1 stopping='' pause_s=1 began status
  trap 'stopping=1; [[ $child ]] && kill -TERM "$child"' TERM INT
  while :; do
    began=$SECONDS
    "$@" &
    child=$!
    [[ $stopping ]] && kill -TERM "$child" # told while it started
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` early
      wait "$child"
      status=$?
    done
    child=
    [[ $stopping ]] && return "$status"
    # It cannot use its configuration and has said why. Later on the same is no reason to give up.
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
