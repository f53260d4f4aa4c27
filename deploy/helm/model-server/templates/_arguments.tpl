{{/*
The arguments of a server for the profile of one pool, as a YAML list.
*/}}
{{- define "server.vllmArguments" -}}
{{- $events := .kvEvents }}
{{- $args := list .model "--port" (toString (int (.port | default 8000))) }}
{{- with .servedNames }}{{ $args = concat $args (list "--served-model-name") . }}{{ end }}
{{- with .maxModelLenTokens }}{{ $args = concat $args (list "--max-model-len" (toString (int64 .))) }}{{ end }}
{{- with .blockSizeTokens }}{{ $args = concat $args (list "--block-size" (toString (int64 .))) }}{{ end }}
{{- $args = concat $args (list "--enable-prefix-caching" "--prefix-caching-hash-algo" (include "server.hashAlgorithm" .) "--enable-prompt-tokens-details") }}
{{- if kindIs "map" $events }}
{{- $config := dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" ($events.endpoint | default "tcp://*:5557") "topic" ($events.topic | default "kv-events") }}
{{- with $events.replayEndpoint }}{{ $_ := set $config "replay_endpoint" . }}{{ end }}
{{- $args = concat $args (list "--kv-events-config" (toJson $config)) }}
{{- end }}
{{- with .kvOffload }}
{{- $extra := dict "cpu_bytes_to_use" (int64 .memoryBytes) "eviction_policy" (.policy | default "lru") }}
{{- if has .policy (list "uses" "importance") }}
{{- $_ := set $extra "eviction_policy" "UsesCachePolicy" }}
{{- $_ := set $extra "cache_policy_module_path" "model_server.pods.vllm.offload_policy" }}
{{- end }}
{{- $args = concat $args (list "--kv-transfer-config" (toJson (dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_connector_extra_config" $extra))) }}
{{- end }}
{{- with .lora }}
{{- $args = concat $args (list "--enable-lora" "--max-loras" (toString (int (.maxLoras | default 1))) "--max-lora-rank" (toString (int (.maxRank | default 16)))) }}
{{- with .maxCpuLoras }}{{ $args = concat $args (list "--max-cpu-loras" (toString (int .))) }}{{ end }}
{{- with .adapters }}
{{- $args = append $args "--lora-modules" }}
{{- range . }}{{ $args = append $args (printf "%s=%s" .name .path) }}{{ end }}
{{- end }}
{{- end }}
{{- toYaml (concat $args (.extraArgs | default list)) }}
{{- end }}

{{/* The same profile for this repository's model server, without extraArgs and kvOffload, which only vLLM knows. */}}
{{- define "server.simulatedArguments" -}}
{{- $events := .kvEvents }}
{{- $args := list "--host" "0.0.0.0" "--port" (toString (int (.port | default 8000))) "--model" .model }}
{{- range .servedNames }}{{ $args = concat $args (list "--served-model-name" .) }}{{ end }}
{{- with .maxModelLenTokens }}{{ $args = concat $args (list "--max-model-len" (toString (int64 .))) }}{{ end }}
{{- with .blockSizeTokens }}{{ $args = concat $args (list "--block-size" (toString (int64 .))) }}{{ end }}
{{- $args = concat $args (list "--prefix-caching-hash-algo" (include "server.hashAlgorithm" .)) }}
{{- if hasKey . "hashSeed" }}{{ $args = concat $args (list "--hash-seed" (toString (int64 .hashSeed))) }}{{ end }}
{{- if kindIs "map" $events }}
{{- $args = concat $args (list "--kv-events-endpoint" ($events.endpoint | default "tcp://*:5557") "--kv-events-topic" ($events.topic | default "kv-events")) }}
{{- with $events.replayEndpoint }}{{ $args = concat $args (list "--kv-events-replay-endpoint" .) }}{{ end }}
{{- end }}
{{- with .lora }}
{{- $args = concat $args (list "--max-loras" (toString (int (.maxLoras | default 1)))) }}
{{- if .runtimeUpdates }}{{ $args = append $args "--allow-runtime-lora-updating" }}{{ end }}
{{- range .adapters }}{{ $args = concat $args (list "--lora" (printf "%s=%s" .name .path)) }}{{ end }}
{{- end }}
{{- toYaml $args }}
{{- end }}

{{/* The environment variables of vLLM's container, as a YAML map. */}}
{{- define "server.vllmEnvironment" -}}
{{- $found := dict }}
{{- if hasKey . "hashSeed" }}{{ $_ := set $found "PYTHONHASHSEED" (toString (int64 .hashSeed)) }}{{ end }}
{{- if and .lora .lora.runtimeUpdates }}{{ $_ := set $found "VLLM_ALLOW_RUNTIME_LORA_UPDATING" "True" }}{{ end }}
{{- toYaml (merge (deepCopy (.extraEnv | default dict)) $found) }}
{{- end }}
