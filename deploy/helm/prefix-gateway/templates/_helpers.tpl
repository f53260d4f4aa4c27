{{- define "gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The name of all objects. It leaves room for the longest suffix, `-valkey`. Names of Services have no dots. */}}
{{- define "gateway.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name (include "gateway.name" .) }}
{{- if contains (include "gateway.name" .) .Release.Name }}{{ $name = .Release.Name }}{{ end }}
{{- .Values.fullnameOverride | default $name | replace "." "-" | trunc 48 | trimSuffix "-" }}
{{- end }}

{{- define "gateway.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The labels of the load test's pods. */}}
{{- define "gateway.loadLabels" -}}
app.kubernetes.io/name: {{ include "gateway.name" . }}-load
app.kubernetes.io/instance: {{ .Release.Name }}-load
{{- end }}

{{- define "gateway.labels" -}}
{{ include "gateway.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: prefix-gateway
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Use: `gateway.image (list $ IMAGE DEFAULT-TAG)`. global.imageRegistry replaces the registry in the repository's name. */}}
{{- define "gateway.image" -}}
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
{{- define "gateway.podLabels" -}}
{{- with merge dict (.Values.podLabels | default dict) (.Values.commonLabels | default dict) }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "gateway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "gateway.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- define "gateway.pool" -}}
{{- .Values.pool.name | default (include "gateway.fullname" .) }}
{{- end }}

{{/* Labels of the model servers' pods. The default is here, because helm would merge a default of values.yaml with the user's labels. */}}
{{- define "gateway.selector" -}}
{{- toYaml (.Values.pool.selector | default (dict "prefix-gateway.dev/pool" "default")) }}
{{- end }}

{{- define "gateway.ownEnvoy" -}}
{{- if eq .Values.shape "own-envoy" }}true{{ end }}
{{- end }}

{{- define "gateway.envoyGateway" -}}
{{- if and (eq .Values.shape "gateway") (eq .Values.gateway.provider "envoy-gateway") }}true{{ end }}
{{- end }}

{{- define "gateway.valkeyBundled" -}}
{{- if and .Values.sharing.enabled (not .Values.sharing.url) }}true{{ end }}
{{- end }}

{{/* The Secret with the password of Redis. Empty: no password is sent. */}}
{{- define "gateway.passwordSecret" -}}
{{- if include "gateway.valkeyBundled" . }}{{ .Values.valkey.existingSecret | default (printf "%s-valkey" (include "gateway.fullname" .)) }}
{{- else if .Values.sharing.enabled }}{{ .Values.sharing.existingSecret }}
{{- end }}
{{- end }}

{{/* The Secret with the key by which replicas sign their messages. Empty: they do not sign them. */}}
{{- define "gateway.signingSecret" -}}
{{- if .Values.sharing.enabled }}{{ .Values.sharing.signingKeySecret }}{{ end }}
{{- end }}

{{/* The Secret with the certificate for clients. Empty: no TLS. */}}
{{- define "gateway.tlsSecret" -}}
{{- .Values.tls.secretName | default (ternary (printf "%s-tls" (include "gateway.fullname" .)) "" (not (empty .Values.tls.certManager.issuerRef))) }}
{{- end }}

{{/* How the Services of the chart get addresses, if the values set this. */}}
{{- define "gateway.ipFamilies" -}}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "gateway.pickerTlsSecret" -}}
{{- .Values.gateway.tls.secretName | default (printf "%s-picker-tls" (include "gateway.fullname" .)) }}
{{- end }}

{{- define "gateway.servicePort" -}}
{{- if and (include "gateway.tlsSecret" .) (eq (int .Values.service.port) 80) }}443{{ else }}{{ int .Values.service.port }}{{ end }}
{{- end }}

{{/* The port of the picker's ext_proc service, in shape `gateway`. */}}
{{- define "gateway.extProcPort" -}}9002{{- end }}

{{- /* The namespaces of the Gateways that the route names, and those where a provider runs the data planes of all its Gateways. */ -}}
{{- define "gateway.callersNamespaces" -}}
{{- $found := list }}
{{- range .Values.gateway.httpRoute.parentRefs }}{{ $found = append $found (.namespace | default $.Release.Namespace) }}{{ end }}
{{- if has .Values.gateway.provider (list "envoy-gateway" "ai-gateway") }}{{ $found = append $found "envoy-gateway-system" }}{{ end }}
{{- $found | default (list .Release.Namespace) | uniq | sortAlpha | join "," }}
{{- end }}

{{- /* Who may call the picker in shape gateway, as peers of a NetworkPolicy. */ -}}
{{- define "gateway.callers" -}}
{{- if .Values.gateway.from -}}
{{ toYaml .Values.gateway.from }}
{{- else if .Values.gateway.tls.requireClientCertificate -}}
- namespaceSelector: {}
{{- else -}}
- namespaceSelector:
    matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: [{{ include "gateway.callersNamespaces" . | replace "," ", " }}]}
{{- end }}
{{- end }}

{{/* The security context of a container, without any right that a server program does not need. */}}
{{- define "gateway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "gateway.podSecurity" -}}
{{- toYaml .Values.podSecurityContext }}
{{- end }}

{{/* Seconds as a duration of Gateway API, which has no fractions: 0.5 becomes 500ms. */}}
{{- define "gateway.duration" -}}
{{- $ms := round (mulf (float64 .) 1000.0) 0 | int64 }}
{{- if mod $ms 1000 }}{{ $ms }}ms{{ else }}{{ div $ms 1000 }}s{{ end }}
{{- end }}

{{/* The bytes of a Kubernetes quantity such as 1.5Gi. */}}
{{- define "gateway.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- $text := . | toString }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$" $text) }}
{{- fail (printf "envoy.resources.limits.memory: %s; write it as 1Gi or 1500Mi" $text) }}
{{- end }}
{{- $number := regexFind "^[0-9.]+" $text }}
{{- mulf (float64 $number) (get $units (trimPrefix $number $text)) | int64 }}
{{- end }}

{{/* Values of earlier releases, and what to write instead. The schema lets them through, so that this message is seen. */}}
{{- define "gateway.removed" -}}
crd: the CRD is of the cluster and of no release; remove `crd`, and apply deploy/crds once (docs/kubernetes.md)
monitoring.onePage: the live page shows the requests of the picker that serves it; remove it
config.envoy.blockedPaths: write config.blockedPaths, or name single paths in config.allowedPaths
config.holdStreams: write gateway.failureMode=FailClose if the gateway fails closed; otherwise remove it
config.kubernetes.status: every replica writes statuses, without a Lease, live numbers and Events; remove it
rbac.aggregate: the ClusterRoles are of the cluster and of no release; remove it, and apply deploy/crds once (docs/kubernetes.md)
{{- end }}

{{/* Refuses values that a schema cannot refuse. */}}
{{- define "gateway.check" -}}
{{- $config := .Values.config | default dict }}
{{- if not .Values.models }}
{{- fail "models: is missing, as in the values of 0.1.0, which `helm upgrade --reuse-values` keeps; write --reset-then-reuse-values instead" }}
{{- end }}
{{- range $path, $instead := include "gateway.removed" . | fromYaml }}
{{- $at := $.Values }}
{{- range splitList "." $path }}{{ $at = ternary (get (default dict $at) .) nil (and (kindIs "map" $at) (hasKey (default dict $at) .)) }}{{ end }}
{{- if not (kindIs "invalid" $at) }}{{ fail (printf "%s: was removed; %s" $path $instead) }}{{ end }}
{{- end }}
{{- if not .Values.image.repository }}
{{- fail "image.repository: no image is published; build and push one with `make images push REGISTRY=registry.example.com/team`, and write --set image.repository=registry.example.com/team/picker" }}
{{- end }}
{{- range $field := list "endpointsFile" "policyFile" }}
{{- if hasKey $config $field }}
{{- fail (printf "config.%s: the chart's pods take endpoints from `pool` and the policy from `policy`; remove it" $field) }}
{{- end }}
{{- end }}
{{- with .Values.networkPolicy }}
{{- if and (kindIs "slice" .monitoring) (not .monitoring) }}
{{- fail "networkPolicy.monitoring: [] let every pod read metrics in 0.1.0, and would let nobody now; remove it for nobody, or write [{namespaceSelector: {}}] for every pod" }}
{{- end }}
{{- end }}
{{- if hasKey (dig "kubernetes" dict $config) "pools" }}
{{- fail "config.kubernetes.pools: the chart has to know the pools, for the permissions of the pods; set inferencePools instead" }}
{{- end }}
{{- range $n, $pool := .Values.inferencePools }}
{{- if and (include "gateway.ownEnvoy" $) (or $pool.selector $pool.targetPorts) }}
{{- fail (printf "inferencePools[%d]: in shape own-envoy the chart makes no InferencePool, it follows those that exist; leave selector and targetPorts out" $n) }}
{{- end }}
{{- if not (or (include "gateway.ownEnvoy" $) $pool.selector) }}
{{- fail (printf "inferencePools[%d].selector: name the labels of this pool's pods; the chart makes the InferencePool" $n) }}
{{- end }}
{{- end }}
{{- if and .Values.inferencePools (include "gateway.envoyGateway" .) }}
{{- fail "inferencePools: a route of provider envoy-gateway reaches all pods through one Service; write labels that all pods have in pool.selector" }}
{{- end }}
{{- if and .Values.inferencePools (eq .Values.shape "gateway") .Values.gateway.httpRoute.enabled }}
{{- fail "gateway.httpRoute.enabled: a Gateway chooses the InferencePool before the picker is asked; write a route for each of inferencePools yourself" }}
{{- end }}
{{- if and (eq .Values.shape "gateway") (include "gateway.tlsSecret" .) }}
{{- fail "tls.secretName: in shape `gateway` clients talk to your Gateway, which has TLS settings of its own; remove tls.secretName" }}
{{- end }}
{{- if and (eq .Values.shape "gateway") (gt (int (dig "workers" 1 $config)) 1) }}
{{- fail "config.workers: an InferencePool names one port of the picker; in shape `gateway` add replicas instead" }}
{{- end }}
{{- if and (include "gateway.ownEnvoy" .) .Values.gateway.provider }}
{{- fail "gateway.provider: in shape own-envoy our own Envoy calls the picker; set shape: gateway" }}
{{- end }}
{{- if and .Values.gateway.provider (dig "dialect" "" $config) }}
{{- fail "config.dialect: gateway.provider sets it; remove one of the two" }}
{{- end }}
{{- if include "gateway.envoyGateway" . }}
{{- if not .Values.gateway.httpRoute.enabled }}
{{- fail "gateway.httpRoute.enabled: the policies of provider envoy-gateway belong to this route; set it to true" }}
{{- end }}
{{- if and (eq .Values.gateway.bodies "FullDuplexStreamed") (eq .Values.gateway.failureMode "FailOpen") }}
{{- fail "gateway.bodies: Envoy Gateway accepts FullDuplexStreamed only if requests fail while the picker is away; set failureMode: FailClose, or bodies: Buffered" }}
{{- end }}
{{- if gt (len .Values.pool.targetPorts) 1 }}
{{- fail "pool.targetPorts: a route of provider envoy-gateway reaches one port of each pod; install one release for each port" }}
{{- end }}
{{- end }}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) }}
{{- fail "gateway.httpRoute.parentRefs: name the Gateway that the route belongs to, or set enabled to false" }}
{{- end }}
{{- if and .Values.tls.requireClientCertificate (not (include "gateway.tlsSecret" .)) }}
{{- fail "tls.requireClientCertificate: needs tls.secretName, the Secret with tls.crt, tls.key and ca.crt" }}
{{- end }}
{{- if and (eq .Values.shape "gateway") .Values.ingress.enabled }}
{{- fail "ingress.enabled: in shape `gateway` clients talk to your Gateway; set gateway.httpRoute, or shape own-envoy" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.hosts: name the hosts whose requests the Ingress takes" }}
{{- end }}
{{- if and .Values.tls.certManager.issuerRef (not .Values.tls.certManager.dnsNames) }}
{{- fail "tls.certManager.dnsNames: name the hosts that the certificate is for" }}
{{- end }}
{{- if and .Values.gateway.tls.requireClientCertificate (not (or .Values.gateway.tls.secretName .Values.gateway.tls.certManager.issuerRef)) }}
{{- fail "gateway.tls.requireClientCertificate: needs gateway.tls.secretName, the Secret with tls.crt, tls.key and ca.crt, the CA of your Gateway's certificate" }}
{{- end }}
{{- if and .Values.sharing.existingSecret (not .Values.sharing.url) }}
{{- fail "sharing.existingSecret: holds the password for sharing.url, but sharing.url is empty; for the bundled Valkey set valkey.existingSecret" }}
{{- end }}
{{- if and .Values.valkey.existingSecret (not (include "gateway.valkeyBundled" .)) }}
{{- fail "valkey.existingSecret: holds the password of the bundled Valkey, but Valkey is off; for sharing.url set sharing.existingSecret" }}
{{- end }}
{{- if and (eq .Values.service.type "ClusterIP") .Values.service.nodePort }}
{{- fail "service.nodePort: means something with service.type NodePort and LoadBalancer only" }}
{{- end }}
{{- if and .Values.service.nodePort (not (include "gateway.ownEnvoy" .)) }}
{{- fail "service.nodePort: in shape `gateway` clients talk to your Gateway, which has a Service of its own; remove service.nodePort" }}
{{- end }}
{{- if and (ne .Values.service.type "LoadBalancer") (or .Values.service.loadBalancerClass .Values.service.loadBalancerSourceRanges) }}
{{- fail (printf "service.type: is %s, and service.loadBalancerClass and loadBalancerSourceRanges mean something with LoadBalancer only" .Values.service.type) }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail "autoscaling.minReplicas: is above autoscaling.maxReplicas" }}
{{- end }}
{{- end }}

{{- /* The headers that name the servers which a model server calls. No client may send them. */}}
{{- define "gateway.obeyedHeaders" -}}
- x-prefiller-host-port
- x-llm-d-prefiller-host-port
- x-prefiller-url
- x-data-parallel-host-port
- x-data-parallel-rank
- x-encoder-hosts-ports
- x-llm-d-encoder-hosts-ports
- x-kv-cache-source-host-port
- x-llm-d-kv-cache-source-host-port
{{- end }}
