{{/*
Refuses profiles with which routing would go wrong without an error (docs/vllm-pods.md has the reasons). Rules about one field alone
are in values.schema.json.
*/}}
{{- define "server.check" -}}
{{- if and (or (eq .Values.engine "simulated") .Values.loraSync.enabled) (not .Values.simulated.image.repository) }}
{{- fail "simulated.image.repository: no image is published; build and push one with `make images push REGISTRY=registry.example.com/team`, and write --set simulated.image.repository=registry.example.com/team/model-server" }}
{{- end }}
{{- $profile := .Values.profile }}
{{- $names := $profile.servedNames | default (list $profile.model) }}
{{- $pools := include "server.pools" . | fromYamlArray }}
{{- $events := $profile.kvEvents }}
{{- $ports := dict (toString (int ($profile.port | default 8000))) "port" }}
{{- if kindIs "map" $events }}
{{- range $field, $address := dict "endpoint" ($events.endpoint | default "tcp://*:5557") "replayEndpoint" $events.replayEndpoint }}
{{- $port := include "server.tcpPort" ($address | default "") }}
{{- if and $port (or (lt (int $port) 1) (gt (int $port) 65535)) }}
{{- fail (printf "profile.kvEvents.%s: no other program can know port %s before the pod runs; write a port from 1 to 65535" $field $port) }}
{{- end }}
{{- if and $port (hasKey $ports $port) }}
{{- fail (printf "profile.kvEvents.%s: port %s is that of %s too, and the server would not start; write another" $field $port (get $ports $port)) }}
{{- end }}
{{- if $port }}{{ $_ := set $ports $port $field }}{{ end }}
{{- end }}
{{- end }}
{{- $seen := dict }}
{{- range $pool := $pools }}
{{- if hasKey $seen $pool.name }}{{ fail (printf "profile.pools: the pool %s is listed twice" $pool.name) }}{{ end }}
{{- $_ := set $seen $pool.name true }}
{{- $own := include "server.ofPool" (list $profile $pool) | fromYaml }}
{{- if kindIs "map" $events }}
{{- if not (hasKey $own "hashSeed") }}{{ fail "profile.hashSeed: with kvEvents a seed is needed, because the block names in KV events depend on it; write hashSeed: 0" }}{{ end }}
{{- if not (hasKey $own "blockSizeTokens") }}{{ fail "profile.blockSizeTokens: readers of KV events must know the block size; write the number, 16 on most GPUs" }}{{ end }}
{{- $first := include "server.ofPool" (list $profile (first $pools)) | fromYaml }}
{{- range $field := list "hashSeed" "blockSizeTokens" "hashAlgorithm" }}
{{- if ne (toString (get $own $field)) (toString (get $first $field)) }}
{{- fail (printf "profile.pools: %s differs between pools, so the same prompt has different block hashes on them; write one at the top of the profile" $field) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $profile.exactRouting (ne (include "server.hashAlgorithm" $own) "sha256_cbor") }}
{{- fail "profile.hashAlgorithm: exactRouting needs sha256_cbor, the only algorithm that other programs can compute" }}
{{- end }}
{{- range $arg := $own.extraArgs }}
{{- $flag := regexReplaceAll "=.*" $arg "" | replace "_" "-" }}
{{- if has $flag (list "--model" "--served-model-name" "--port" "--max-model-len" "--block-size" "--enable-prefix-caching" "--no-enable-prefix-caching" "--prefix-caching-hash-algo" "--enable-prompt-tokens-details" "--no-enable-prompt-tokens-details" "--kv-events-config" "--enable-lora" "--no-enable-lora" "--max-loras" "--max-lora-rank" "--max-cpu-loras" "--lora-modules") }}
{{- fail (printf "profile.extraArgs: the profile itself writes %s; use its field" $flag) }}
{{- end }}
{{- if and $profile.kvOffload (has $flag (list "--kv-transfer-config" "--kv-offloading-size")) }}
{{- fail (printf "profile.extraArgs: %s would replace what kvOffload writes; write one of the two" $flag) }}
{{- end }}
{{- if eq $flag "--disable-log-stats" }}
{{- fail "profile.extraArgs: --disable-log-stats empties /metrics, so the server always looks idle; leave this argument out" }}
{{- end }}
{{- end }}
{{- range $name := list "PYTHONHASHSEED" "VLLM_ALLOW_RUNTIME_LORA_UPDATING" }}
{{- if hasKey ($own.extraEnv | default dict) $name }}{{ fail (printf "profile.extraEnv: the profile itself writes %s; use hashSeed or lora.runtimeUpdates" $name) }}{{ end }}
{{- end }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if has .name (list "PYTHONHASHSEED" "VLLM_ALLOW_RUNTIME_LORA_UPDATING") }}{{ fail (printf "extraEnv: the profile itself writes %s; use profile.hashSeed or profile.lora.runtimeUpdates" .name) }}{{ end }}
{{- end }}
{{- if and $profile.exactRouting (not (kindIs "map" $events)) }}{{ fail "profile.exactRouting: needs KV events, but the servers publish none; write kvEvents: {}" }}{{ end }}
{{- if ne (len $names) (len (uniq $names)) }}{{ fail "profile.servedNames: a name is listed twice" }}{{ end }}
{{- with $profile.lora }}
{{- if and (hasKey . "maxCpuLoras") (lt (int .maxCpuLoras) (int (.maxLoras | default 1))) }}{{ fail "profile.lora.maxCpuLoras: is smaller than maxLoras, and vLLM does not start with that" }}{{ end }}
{{- $adapters := dict }}
{{- range .adapters }}
{{- if hasKey $adapters .name }}{{ fail (printf "profile.lora.adapters: the adapter %s is listed twice" .name) }}{{ end }}
{{- if has .name $names }}{{ fail (printf "profile.lora.adapters: %s is the model's name too, and requests for one would get the other" .name) }}{{ end }}
{{- $_ := set $adapters .name true }}
{{- end }}
{{- end }}
{{- if and .Values.autoscaling.enabled .Values.autoscaling.keda.enabled (not .Values.autoscaling.keda.prometheus) }}
{{- fail "autoscaling.keda.prometheus: write the address of Prometheus, such as http://prometheus-operated.monitoring:9090" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (not .Values.autoscaling.metrics) (not .Values.autoscaling.keda.enabled) }}
{{- fail "autoscaling.metrics: name at least one metric; without metrics CPU would count, which does not show the load of a model server" }}
{{- end }}
{{- if .Values.multiNode.enabled }}
{{- if ne .Values.engine "vllm" }}{{ fail "multiNode.enabled: a simulated server is one process; write engine: vllm" }}{{ end }}
{{- range $pool := $pools }}
{{- range $arg := (include "server.ofPool" (list $profile $pool) | fromYaml).extraArgs }}
{{- if has (regexReplaceAll "=.*" (toString $arg) "" | replace "_" "-") (list "--nnodes" "-n" "--node-rank" "-r" "--master-addr" "--headless") }}
{{- fail (printf "profile.extraArgs: multiNode itself writes %s; use its field" $arg) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $_ := .Values.pools }}
{{- if not (hasKey $seen $name) }}{{ fail (printf "pools.%s: profile.pools has no pool of that name" $name) }}{{ end }}
{{- end }}
{{- with .Values.simulated.kvStore }}
{{- if .enabled }}
{{- if eq $.Values.engine "vllm" }}{{ fail "simulated.kvStore.enabled: only this repository's model server has this store, but engine is vllm; profile.kvOffload keeps vLLM's KV in main memory" }}{{ end }}
{{- $words := list }}{{ range $.Values.simulated.args }}{{ $words = append $words (toString .) }}{{ end }}
{{- if not (regexMatch "(^| )--runner[ =]hf( |$)" (join " " $words)) }}{{ fail "simulated.kvStore.enabled: stores the KV of a real model, but this model is simulated; write args: [--runner, hf]" }}{{ end }}
{{- range $word := $words }}
{{- if regexMatch "^--kv-store(-size|-ratio)?(=|$)" $word }}{{ fail (printf "simulated.args: simulated.kvStore itself writes %s; use its field" $word) }}{{ end }}
{{- end }}
{{- if .claimName }}
{{- range $pool := $pools }}
{{- $own := get ($.Values.pools | default dict) $pool.name | default dict }}
{{- if gt (int (ternary $own.replicas $.Values.replicas (hasKey $own "replicas"))) 1 }}{{ fail "simulated.kvStore.claimName: only one server can use a store, but there are several replicas; write replicas: 1, or leave claimName out" }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.loraSync.enabled }}
{{- if not (and $profile.lora $profile.lora.runtimeUpdates) }}{{ fail "loraSync.enabled: needs profile.lora.runtimeUpdates: true; without this a running server loads no adapters" }}{{ end }}
{{- end }}
{{- end }}
