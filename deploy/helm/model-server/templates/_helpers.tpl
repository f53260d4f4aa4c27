{{- define "server.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "server.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "server.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "server.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The name of the service account. Never empty: the API server would keep the name that a Deployment had, of an account that is gone. */}}
{{- define "server.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "server.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "server.selectorLabels" -}}
app.kubernetes.io/name: {{ include "server.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "server.labels" -}}
{{ include "server.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: prefix-gateway
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Use: `server.image (list $ IMAGE DEFAULT-TAG)`. global.imageRegistry replaces the registry in the repository's name. */}}
{{- define "server.image" -}}
{{- $image := index . 1 }}
{{- $repository := $image.repository }}
{{- with dig "imageRegistry" "" ((index . 0).Values.global | default dict) }}
{{- $parts := splitList "/" $repository }}
{{- if and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) }}{{ $parts = rest $parts }}{{ end }}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (join "/" $parts) }}
{{- end }}
{{- if $image.digest }}{{ $repository }}@{{ $image.digest }}
{{- else }}{{ $repository }}:{{ $image.tag | default (index . 2) }}
{{- end }}
{{- end }}

{{/* Labels of every pod besides the labels of its part: podLabels, and those commonLabels that podLabels do not set. */}}
{{- define "server.podLabels" -}}
{{- with merge dict (.Values.podLabels | default dict) (.Values.commonLabels | default dict) }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* The pools of the profile, as a YAML list. If the profile has no pools: one pool without a name. */}}
{{- define "server.pools" -}}
{{- toYaml (.Values.profile.pools | default (list (dict "name" ""))) }}
{{- end }}

{{/* Use: `server.ofPool (list PROFILE POOL)`. The profile, changed by the fields of one pool. */}}
{{- define "server.ofPool" -}}
{{- $profile := omit (deepCopy (index . 0)) "pools" }}
{{- $pool := index . 1 }}
{{- range $field := list "blockSizeTokens" "hashAlgorithm" "hashSeed" }}
{{- if hasKey $pool $field }}{{ $_ := set $profile $field (index $pool $field) }}{{ end }}
{{- end }}
{{- $_ := set $profile "extraArgs" (concat ($profile.extraArgs | default list) ($pool.extraArgs | default list)) }}
{{- $_ := set $profile "extraEnv" (merge (deepCopy ($pool.extraEnv | default dict)) ($profile.extraEnv | default dict)) }}
{{- toYaml $profile }}
{{- end }}

{{/* The model that the pods say they serve, which labels the pickers' metrics. */}}
{{- define "server.model" -}}
{{- get (.Values.podAnnotations | default dict) "prefix-gateway.dev/model" | default (first (.Values.profile.servedNames | default (list .Values.profile.model))) }}
{{- end }}

{{- define "server.hashAlgorithm" -}}
{{- .hashAlgorithm | default "sha256_cbor" }}
{{- end }}

{{/* The port of a tcp:// address. */}}
{{- define "server.tcpPort" -}}
{{- if hasPrefix "tcp://" . }}{{ regexFind "[0-9]+$" . }}{{ end }}
{{- end }}

{{/* An argument as text. It may be written as a number, and 1000000 must not become 1e+06. */}}
{{- define "server.word" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . | toString | quote }}{{ else }}{{ . | toString | quote }}{{ end }}
{{- end }}

{{/* How fast the number of servers may change. A new server loads its model for minutes and starts with an empty cache. */}}
{{- define "server.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 50, periodSeconds: 60}, {type: Pods, value: 1, periodSeconds: 60}]
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: 600
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end }}
