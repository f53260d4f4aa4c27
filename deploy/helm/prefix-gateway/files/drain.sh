#!/bin/bash
# Envoy's preStop hook: no request is refused while the pod terminates. On SIGTERM, Envoy would cut the answers in flight.
#   drain.sh ADMIN-PORT AT-LEAST-SECONDS AT-MOST-SECONDS
# 1. The health check fails. So the pod is no longer ready, and each answer closes its connection, so that clients go elsewhere.
# 2. New connections are still served for AT-LEAST-SECONDS, until every node and load balancer knows that the pod terminates.
# 3. The port closes. Requests in flight finish, within AT-MOST-SECONDS in all. Then the hook returns, and Envoy gets SIGTERM.
# The script needs only bash and sleep, because Envoy's image has no curl.
set -u
port=$1 at_least=$2 at_most=$3

ask() { # METHOD PATH: prints the answer's lines; fails if Envoy has ended
  local line
  exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
  printf '%s %s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n' "$1" "$2" >&3
  while IFS= read -r -t 5 line <&3; do printf '%s\n' "${line%$'\r'}"; done
  exec 3>&-
}

in_flight() { # prints the number of requests in flight; nothing if Envoy does not say; `gone` if nothing listens
  { ask GET '/stats?filter=http.gateway.downstream_rq_active' || echo gone; } | while IFS= read -r line; do
    [[ $line == http.gateway.downstream_rq_active:* || $line == gone ]] && printf '%s' "${line##* }"
  done
}

{ ask POST /healthcheck/fail || exit 0; } >/dev/null 2>&1
sleep "$at_least"
ask POST '/drain_listeners?inboundonly' >/dev/null 2>&1
quiet=0
while ((SECONDS < at_most && quiet < 2)); do # two checks, because a request may have arrived while the port closed
  left=$(in_flight 2>/dev/null)
  [[ $left == gone ]] && exit 0 # Envoy has ended by itself
  if [[ $left == 0 ]]; then quiet=$((quiet + 1)); else quiet=0; fi
  sleep 0.5
done
exit 0
