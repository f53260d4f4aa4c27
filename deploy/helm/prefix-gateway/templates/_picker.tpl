{{/* The picker's container, which is a sidecar of Envoy or alone in its pod. */}}
{{- define "gateway.picker" -}}
{{- $own := include "gateway.ownEnvoy" . -}}
- name: picker
  image: {{ include "gateway.image" (list $ .Values.image .Chart.AppVersion) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if $own }}
  restartPolicy: Always
  {{- end }}
  {{- if $own }}
  # The script starts the picker again after a crash. If the container ended instead, the pod would not be ready, although Envoy serves.
  command: [bash, /etc/prefix-gateway/config/keep.sh, run, epp, serve]
  {{- else }}
  command: [epp, serve]
  {{- end }}
  args: [--config, /etc/prefix-gateway/config/config.yaml]
  {{- $tracing := include "gateway.tracingEnv" . | fromYamlArray }}
  {{- with concat $tracing (.Values.picker.extraEnv | default list) }}
  env: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    {{- if not $own }}
    - {name: grpc, containerPort: {{ include "gateway.extProcPort" . }}}
    - {name: grpc-health, containerPort: 9003}
    {{- end }}
    {{- range $n := until (int (dig "workers" 1 (.Values.config | default dict))) }}
    - {name: {{ include "gateway.metricsPortName" $n }}, containerPort: {{ add 9090 $n }}}
    {{- end }}
  startupProbe:
    # Waits until the pool has been read. A picker that starts while the API server is away knows no endpoint.
    httpGet: {path: /readyz, port: metrics}
    periodSeconds: 1
    failureThreshold: 300
  {{- if not $own }}
  readinessProbe:
    httpGet: {path: /readyz, port: metrics}
    periodSeconds: 2
    failureThreshold: 2
  {{- end }}
  livenessProbe:
    {{- if $own }}
    exec:
      # Fails if the picker hangs, but not while the picker is away.
      command: [bash, /etc/prefix-gateway/config/keep.sh, alive, {{ ternary "::1" "127.0.0.1" (hasPrefix "[" .Values.bindAddress) | quote }}, "9090"]
    timeoutSeconds: 5
    {{- else }}
    httpGet: {path: /healthz, port: metrics}
    timeoutSeconds: 3
    {{- end }}
    periodSeconds: 10
    failureThreshold: 3
  {{- if not $own }}
  lifecycle:
    preStop:
      # Gateways send requests here until they know that this pod is terminating.
      sleep: {seconds: {{ .Values.drain.settleSeconds }}}
  {{- end }}
  securityContext: {{- include "gateway.containerSecurity" . | nindent 4 }}
  resources: {{- toYaml .Values.picker.resources | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/prefix-gateway/config, readOnly: true}
    - {name: policy, mountPath: /etc/prefix-gateway/policy, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: api-access, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- if $own }}
    - {name: run, mountPath: /run/prefix-gateway}
    {{- else }}
    - {name: tls, mountPath: /etc/prefix-gateway/tls, readOnly: true}
    {{- end }}
    {{- if include "gateway.passwordSecret" . }}
    - {name: redis, mountPath: /etc/prefix-gateway/redis, readOnly: true}
    {{- end }}
    {{- if include "gateway.signingSecret" . }}
    - {name: signing, mountPath: /etc/prefix-gateway/signing, readOnly: true}
    {{- end }}
    {{- if .Values.models.apiKeySecret }}
    - {name: models, mountPath: /etc/prefix-gateway/models, readOnly: true}
    {{- end }}
    {{- with .Values.picker.volumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{/* OpenTelemetry's variables for the address of the collector. Variables of picker.extraEnv come later and override these. */}}
{{- define "gateway.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .enabled }}
{{- range $name, $value := dict "OTEL_EXPORTER_OTLP_ENDPOINT" .endpoint "OTEL_EXPORTER_OTLP_PROTOCOL" .protocol "OTEL_TRACES_SAMPLER" .sampler "OTEL_TRACES_SAMPLER_ARG" .samplerArg }}
{{- with $value }}
- {name: {{ $name }}, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with .headersSecret }}
{{- if .name }}
- {name: OTEL_EXPORTER_OTLP_HEADERS, valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}}
{{- end }}
{{- end }}
{{- else }}
[]
{{- end }}
{{- end }}
{{- end }}

{{/* Each worker has its own port. */}}
{{- define "gateway.metricsPortName" -}}
{{- if . }}metrics-{{ . }}{{ else }}metrics{{ end }}
{{- end }}
