{{/*
One pod of a server. Use: `server.pod (dict "root" $ "pool" POOL "profile" PROFILE "own" OWN "nodes" N "worker" BOOL)`. nodes: number
of pods if the server spans several nodes, else 0. worker: the pod is not the leader.
*/}}
{{- define "server.pod" -}}
{{- $root := .root }}{{ $pool := .pool }}{{ $profile := .profile }}{{ $own := .own }}{{ $nodes := .nodes }}{{ $worker := .worker }}
{{- $name := include "server.fullname" $root }}
{{- $vllm := eq $root.Values.engine "vllm" }}
{{- $engine := ternary $root.Values.vllm $root.Values.simulated $vllm }}
{{- $port := int ($profile.port | default 8000) }}
{{- $kvStore := and (not $vllm) $root.Values.simulated.kvStore.enabled }}
{{- $atMost := add $root.Values.drain.settleSeconds $root.Values.longestAnswerSeconds }}
metadata:
  labels: {{- include "server.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/part-of: prefix-gateway
    {{- if not $worker }}
    # Pickers find servers by this label. A worker does not have it, because only its leader is an endpoint.
    prefix-gateway.dev/pool: {{ $root.Values.pool | quote }}
    {{- with $own.role | default $root.Values.role }}
    llm-d.ai/role: {{ . }}
    {{- end }}
    {{- end }}
    {{- with $pool.name }}
    prefix-gateway.dev/profile-pool: {{ . }}
    {{- end }}
    {{- with include "server.podLabels" $root }}{{ . | nindent 4 }}{{ end }}
  annotations:
    kubectl.kubernetes.io/default-container: server
    {{- if not (hasKey ($root.Values.podAnnotations | default dict) "prefix-gateway.dev/model") }}
    # Several releases may use the same pool label. Requests go to the servers that have their model.
    prefix-gateway.dev/model: {{ include "server.model" $root | quote }}
    {{- end }}
    {{- with $profile.lora }}
    {{- with .adapters }}
    # Pickers use these values until the server's metrics give real ones.
    prefix-gateway.dev/adapters: {{ $names := list }}{{ range . }}{{ $names = append $names .name }}{{ end }}{{ join "," $names | quote }}
    {{- end }}
    {{- end }}
    {{- with $root.Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "server.serviceAccountName" $root }}
  automountServiceAccountToken: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $engine.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ add $atMost 30 }}
  {{- if or (and $root.Values.loraSync.enabled (not $worker)) $root.Values.initContainers }}
  initContainers:
    {{- with $root.Values.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- if and $root.Values.loraSync.enabled (not $worker) }}
    # A sidecar, which itself waits until the server answers.
    - name: lora-sync
      image: {{ include "server.image" (list $root $root.Values.simulated.image $root.Chart.AppVersion) }}
      imagePullPolicy: {{ $root.Values.simulated.image.pullPolicy }}
      restartPolicy: Always
      command: [model-server, lora-sync]
      args:
        - --server
        - http://127.0.0.1:{{ $port }}
        - --file
        - /etc/model-server/adapters/adapters.yaml
        - --interval-s
        - {{ $root.Values.loraSync.intervalSeconds | quote }}
        - --status-host
        - 0.0.0.0
        - --status-port
        - "8081"
        {{- if $root.Values.loraSync.prune }}
        - --prune
        {{- end }}
      ports:
        - {name: lora-status, containerPort: 8081}
      # Checks only that the process lives. An adapter that cannot be loaded must not stop the server's traffic.
      livenessProbe:
        httpGet: {path: /status, port: lora-status}
        periodSeconds: 10
        timeoutSeconds: 3
      securityContext:
        {{- /* As the pod's user is left to the cluster (OpenShift), so is this one. */}}
        {{- if not (kindIs "invalid" (dig "runAsUser" nil ($engine.podSecurityContext | default dict))) }}
        runAsUser: 65532
        {{- end }}
        runAsNonRoot: true
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources: {{- toYaml $root.Values.loraSync.resources | nindent 8 }}
      volumeMounts:
        - {name: adapters-list, mountPath: /etc/model-server/adapters, readOnly: true}
    {{- end }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "server.image" (list $root $engine.image $root.Chart.AppVersion) }}
      imagePullPolicy: {{ $engine.image.pullPolicy }}
      {{- if $vllm }}
      command: {{- toYaml $engine.command | nindent 8 }}
      args:
        {{- include "server.vllmArguments" $profile | nindent 8 }}
        {{- if $nodes }}
        - --nnodes
        - {{ $nodes | quote }}
        - --node-rank
        - $(LWS_WORKER_INDEX)
        - --master-addr
        - $(LWS_LEADER_ADDRESS)
        {{- if $worker }}
        - --headless
        {{- end }}
        {{- end }}
      env:
        {{- range $key, $value := include "server.vllmEnvironment" $profile | fromYaml }}
        - {name: {{ $key }}, value: {{ $value | quote }}}
        {{- end }}
        {{- if not (hasKey ($profile.extraEnv | default dict) "HF_HOME") }}
        - {name: HF_HOME, value: /cache/huggingface}
        {{- end }}
        {{- /* Libraries look for the user and a cache folder under both names, and the image may not know the user. */}}
        {{- range $key, $value := dict "HOME" "/tmp" "USER" "vllm" }}
        {{- if not (hasKey ($profile.extraEnv | default dict) $key) }}
        - {name: {{ $key }}, value: {{ $value }}}
        {{- end }}
        {{- end }}
        {{- if $worker }}
        - {name: DRAIN_HOST, value: $(LWS_LEADER_ADDRESS)}
        {{- end }}
        {{- with $engine.huggingFaceSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
        {{- end }}
        {{- with $root.Values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- else }}
      command: [model-server, serve]
      args:
        {{- include "server.simulatedArguments" $profile | nindent 8 }}
        - --drain-timeout-s
        - {{ $root.Values.longestAnswerSeconds | quote }}
        {{- range $engine.args }}
        - {{ include "server.word" . }}
        {{- end }}
        {{- if $kvStore }}
        - --kv-store
        - /kv-store/{{ $pool.name | default "server" }}
        - --kv-store-size
        - {{ $engine.kvStore.sizeGB | quote }}
        - --kv-store-ratio
        - {{ $engine.kvStore.ratio | quote }}
        {{- end }}
      {{- with $root.Values.extraEnv }}
      env: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      {{- if not $worker }}
      ports:
        - {name: http, containerPort: {{ $port }}}
        {{- if kindIs "map" $profile.kvEvents }}
        {{- with include "server.tcpPort" ($profile.kvEvents.endpoint | default "tcp://*:5557") }}
        - {name: kv-events, containerPort: {{ . }}}
        {{- end }}
        {{- with include "server.tcpPort" ($profile.kvEvents.replayEndpoint | default "") }}
        - {name: kv-replay, containerPort: {{ . }}}
        {{- end }}
        {{- end }}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: {{ ternary 5 1 $vllm }}
        timeoutSeconds: 3
        failureThreshold: {{ ternary (div (int $root.Values.vllm.startupSeconds) 5) (ternary 600 60 $kvStore) $vllm }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 3
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- end }}
      lifecycle:
        preStop:
          {{- if $vllm }}
          # On SIGTERM vLLM drops the requests that it is answering. So the hook waits for these requests first.
          exec:
            command: [python3, /etc/model-server/hooks/drain.py, {{ $port | quote }}, {{ $root.Values.drain.settleSeconds | quote }}, {{ $atMost | quote }}]
          {{- else }}
          # On SIGTERM this server finishes the requests that it has begun, and takes no new ones. Before that, it
          # accepts requests until pickers know that the pod terminates.
          sleep: {seconds: {{ $root.Values.drain.settleSeconds }}}
          {{- end }}
      securityContext:
        {{- if $vllm }}
        {{- toYaml $engine.securityContext | nindent 8 }}
        {{- else }}
        {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
        {{- end }}
      resources: {{- toYaml ($own.resources | default $engine.resources) | nindent 8 }}
      volumeMounts:
        {{- if $vllm }}
        - {name: hooks, mountPath: /etc/model-server/hooks, readOnly: true}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $kvStore }}
        - {name: kv-store, mountPath: /kv-store}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
        {{- with $root.Values.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if $vllm }}
    - name: hooks
      configMap: {name: {{ $name }}-hooks}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $engine.sharedMemory }}}
    - name: cache
      {{- if or $engine.cache.claimName $engine.cache.claim.create }}
      persistentVolumeClaim: {claimName: {{ $engine.cache.claimName | default (printf "%s-models" $name) }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $engine.cache.sizeLimit }}}
      {{- end }}
    {{- end }}
    {{- if $kvStore }}
    - name: kv-store
      {{- if $engine.kvStore.claimName }}
      persistentVolumeClaim: {claimName: {{ $engine.kvStore.claimName }}}
      {{- else }}
      # A quarter more than the largest size of the store, for segments that are being replaced.
      emptyDir: {sizeLimit: {{ printf "%.0fM" (mulf $engine.kvStore.sizeGB 1250) }}}
      {{- end }}
    {{- end }}
    {{- if $root.Values.loraSync.enabled }}
    - name: adapters-list
      configMap: {name: {{ $name }}-adapters}
    {{- end }}
    {{- with $root.Values.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
  topologySpreadConstraints:
    {{- if $root.Values.topologySpreadConstraints }}
    {{- toYaml $root.Values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ $key }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "server.selectorLabels" $root | nindent 10 }}
      {{- if not $nodes }}
      matchLabelKeys: [pod-template-hash]
      {{- end }}
    {{- end }}
    {{- end }}
  {{- with $own.nodeSelector | default $root.Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.tolerations | default $root.Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.affinity | default $root.Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $root.Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
{{- end }}
