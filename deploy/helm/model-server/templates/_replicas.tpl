{{/*
How many replicas a workload gets, as YAML. A field that a chart stops sending goes back to the API's default, which is one pod. So a release that has
sent `spec.replicas` goes on sending it, with the live count while an autoscaler sets it. A release that has never sent it never does, and gives a
fixed number to a HorizontalPodAutoscaler as its least and its most. When a fixed number takes over from an autoscaler, no pod ends: the larger of
both numbers stays until the next upgrade. Where nothing is live, or only rendered, `lookup` finds nothing and the values decide.
Use: dict "root" $ "apiVersion" V "kind" K "name" NAME "scaled" BOOL "fixed" NUMBER-OR-NULL "least" NUMBER. Result: {send: N}, {pin: N}, or nothing.
*/}}
{{- define "server.replicas" -}}
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

{{/* Use: `server.count (list $ POOL)`. The same for the servers of one pool. */}}
{{- define "server.count" -}}
{{- $root := index . 0 }}
{{- $pool := index . 1 }}
{{- $own := get ($root.Values.pools | default dict) $pool.name | default dict }}
{{- $fixed := ternary $own.replicas $root.Values.replicas (hasKey $own "replicas") }}
{{- $scaling := dig "autoscaling" dict $own }}
{{- $least := ternary $scaling.minReplicas $root.Values.autoscaling.minReplicas (hasKey $scaling "minReplicas") }}
{{- $name := printf "%s%s" (include "server.fullname" $root) (ternary (printf "-%s" $pool.name) "" (not (empty $pool.name))) }}
{{- $group := ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $root.Values.multiNode.enabled }}
{{- $kind := ternary "LeaderWorkerSet" "Deployment" $root.Values.multiNode.enabled }}
{{- include "server.replicas" (dict "root" $root "apiVersion" $group "kind" $kind "name" $name "scaled" $root.Values.autoscaling.enabled "fixed" $fixed "least" $least) }}
{{- end }}
