{{/*
How many replicas a workload gets, as YAML. A field that a chart stops sending goes back to the API's default, which is one pod. So a release that has
sent `spec.replicas` goes on sending it, with the live count while an autoscaler sets it. A release that has never sent it never does, and gives a
fixed number to a HorizontalPodAutoscaler as its least and its most. When a fixed number takes over from an autoscaler, no pod ends: the larger of
both numbers stays until the next upgrade. Where nothing is live, or only rendered, `lookup` finds nothing and the values decide.
Use: dict "root" $ "apiVersion" V "kind" K "name" NAME "scaled" BOOL "fixed" NUMBER-OR-NULL "least" NUMBER. Result: {send: N}, {pin: N}, or nothing.
*/}}
{{- define "gateway.replicas" -}}
{{- $namespace := .root.Release.Namespace }}
{{- $live := lookup .apiVersion .kind $namespace .name | default dict }}
{{- $scaler := lookup "autoscaling/v2" "HorizontalPodAutoscaler" $namespace .name | default (lookup "autoscaling/v2" "HorizontalPodAutoscaler" $namespace (printf "keda-hpa-%s" .name)) | default dict }}
{{- $count := int (dig "spec" "replicas" 0 $live) }}
{{- $mark := dig "metadata" "annotations" "prefix-gateway.dev/replicas" "" $live }}
{{- $sent := eq $mark "sent" }}
{{- $applied := false }}
{{- $others := false }}
{{- range dig "metadata" "managedFields" list $live }}
{{- $owned := dig "f:spec" dict (.fieldsV1 | default dict) }}
{{- if and (eq .operation "Apply") (hasKey $owned "f:template") }}{{ $applied = true }}{{ end }}
{{- if and (eq .operation "Update") (hasKey $owned "f:replicas") (ne .manager "helm") }}{{ $others = true }}{{ end }}
{{- if and (not $mark) (eq .manager "helm") (hasKey $owned "f:replicas") }}{{ $sent = true }}{{ end }}
{{- end }}
{{- /* An object without the mark is of an older chart, which sent the number unless it made an autoscaler. */}}
{{- if and (not $mark) .scaled $live (empty $scaler) }}{{ $sent = true }}{{ end }}
{{- /* Server-side apply leaves a field to its other owner. */}}
{{- if and $applied $others }}{{ $sent = false }}{{ end }}
{{- if not (or .scaled (kindIs "invalid" .fixed)) }}
{{- $fixed := int .fixed }}
{{- if ne (dig "spec" "minReplicas" 1 $scaler | int) (dig "spec" "maxReplicas" 1 $scaler | int) }}{{ $fixed = max $fixed $count }}{{ end }}
{{- if or (empty $live) $sent (eq $fixed 0) }}{send: {{ $fixed }}}{{ else }}{pin: {{ $fixed }}}{{ end }}
{{- else if $sent }}{send: {{ max $count (int .least) }}}
{{- end }}
{{- end }}

{{- define "gateway.count" -}}
{{- include "gateway.replicas" (dict "root" . "apiVersion" "apps/v1" "kind" "Deployment" "name" (include "gateway.fullname" .) "scaled" .Values.autoscaling.enabled "fixed" .Values.replicas "least" .Values.autoscaling.minReplicas) }}
{{- end }}
