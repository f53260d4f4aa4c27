{{/*
The picker's configuration: the fields that this chart computes, overridden by `config` of the values.
*/}}
{{- define "gateway.config" -}}
{{- include "gateway.check" . }}
{{- $own := include "gateway.ownEnvoy" . }}
{{- $bind := .Values.bindAddress }}
{{- $kubernetes := dict "pool" (include "gateway.pool" .) }}
{{- if .Values.inferencePools }}
{{- $names := list }}
{{- range .Values.inferencePools }}
{{- $names = append $names .name }}
{{- end }}
{{- $kubernetes = dict "pools" $names }}
{{- else if or (and $own (eq .Values.pool.follow "pods")) (include "gateway.envoyGateway" .) }}
{{- $_ := set $kubernetes "selector" (include "gateway.selector" . | fromYaml) }}
{{- $_ := set $kubernetes "targetPorts" .Values.pool.targetPorts }}
{{- end }}
{{- $_ := set $kubernetes "service" (include "gateway.fullname" .) }}
{{- $admin := dict "address" (printf "%s:9090" $bind) }}
{{- $base := dict
  "kubernetes" $kubernetes
  "policyFile" "/etc/prefix-gateway/policy/policy.yaml"
  "admin" $admin
}}
{{- if $own }}
{{- /* When the picker gets SIGTERM, Envoy has already ended. So the picker need not wait. */}}
{{- $_ := set $base "drainSeconds" 5 }}
{{- $_ := set $base "listen" (dict "address" "unix:/run/prefix-gateway/picker.sock") }}
{{- $envoy := dict
  "listen" (printf "%s:8080" $bind)
  "status" (printf "%s:9902" $bind)
  "admin" "127.0.0.1:9901"
  "edsFile" "/run/prefix-gateway/eds.json"
}}
{{- with dig "limits" "memory" "" .Values.envoy.resources }}
{{- /* A fifth of the limit is left for memory outside Envoy's heap: threads, the kernel's buffers, and growth between two checks. */}}
{{- $_ := set $envoy "maxHeapBytes" (div (mul (include "gateway.bytes" . | int64) 4) 5) }}
{{- end }}
{{- if include "gateway.tlsSecret" . }}
{{- $tls := dict "certFile" "/etc/prefix-gateway/tls/tls.crt" "keyFile" "/etc/prefix-gateway/tls/tls.key" }}
{{- if .Values.tls.requireClientCertificate }}
{{- $_ := set $tls "clientCaFile" "/etc/prefix-gateway/tls/ca.crt" }}
{{- end }}
{{- $_ := set $envoy "tls" $tls }}
{{- end }}
{{- if and .Values.tracing.enabled .Values.tracing.envoy.collector }}
{{- $_ := set $envoy "tracing" .Values.tracing.envoy }}
{{- end }}
{{- $_ := set $base "envoy" $envoy }}
{{- else }}
{{- $_ := set $base "drainSeconds" (int .Values.longestAnswerSeconds) }}
{{- $tls := dict "certFile" "/etc/prefix-gateway/tls/tls.crt" "keyFile" "/etc/prefix-gateway/tls/tls.key" }}
{{- if .Values.gateway.tls.requireClientCertificate }}
{{- $_ := set $tls "clientCaFile" "/etc/prefix-gateway/tls/ca.crt" }}
{{- end }}
{{- $listen := dict "address" (printf "%s:%s" $bind (include "gateway.extProcPort" .)) "tls" $tls }}
{{- if eq (dig "listen" "transport" "http2" (.Values.config | default dict)) "http2" }}
{{- $_ := set $listen "healthAddress" (printf "%s:9003" $bind) }}
{{- end }}
{{- $_ := set $base "listen" $listen }}
{{- with .Values.gateway.provider }}
{{- $_ := set $base "dialect" . }}
{{- end }}
{{- if eq .Values.gateway.failureMode "FailClose" }}
{{- $_ := set $base "envoy" (dict "failOpen" false) }}
{{- end }}
{{- if and (include "gateway.envoyGateway" .) (not .Values.gateway.modeOverride) }}
{{- $_ := set $base "streams" (dict "modeOverride" false) }}
{{- end }}
{{- end }}
{{- if .Values.models.apiKeySecret }}
{{- $_ := set $base "models" (dict "apiKeyFile" "/etc/prefix-gateway/models/api-key") }}
{{- end }}
{{- if .Values.sharing.enabled }}
{{- $redis := dict "url" (.Values.sharing.url | default (printf "redis://%s-valkey:6379/0" (include "gateway.fullname" .))) }}
{{- if include "gateway.passwordSecret" . }}
{{- $_ := set $redis "passwordFile" "/etc/prefix-gateway/redis/password" }}
{{- end }}
{{- if .Values.sharing.signingKeySecret }}
{{- $_ := set $redis "signingKeyFile" "/etc/prefix-gateway/signing/signing-key" }}
{{- end }}
{{- $_ := set $base "sharing" (dict "pool" (printf "%s/%s" .Release.Namespace (include "gateway.pool" .)) "redis" $redis) }}
{{- end }}
{{- if .Values.tracing.enabled }}
{{- $_ := set $base "tracing" true }}
{{- end }}
{{- toYaml (mergeOverwrite $base (deepCopy (.Values.config | default dict))) }}
{{- end }}

{{- define "gateway.policy" -}}
apiVersion: prefix-gateway.dev/v1alpha1
kind: PrefixRoutingPolicy
metadata:
  name: {{ include "gateway.fullname" . }}-default
spec: {{- if .Values.policy }}{{ toYaml .Values.policy | nindent 2 }}{{ else }} {}{{ end }}
{{- end }}
