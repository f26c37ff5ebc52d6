{{/* The figures are those of docs/sizing.md. Memory in KiB: the agent itself, each Machine with its claim, as many ended claims, each spoke. */}}
{{- define "capi-agent.peakKiB" -}}
{{- add (mul 53 1024) (mul (add 23 8) (int .machines)) (mul 60 (int .spokes)) }}
{{- end }}

{{/* The request covers the peak, in steps of 128 MiB. The limit leaves room beyond it for what all callers together can occupy (2 GiB, and 16 MiB
for each of 18 that attack at once) and for all the ended claims that Clusters can store (313 MiB), in steps of 1 GiB. */}}
{{- define "capi-agent.resources" -}}
{{- $peak := include "capi-agent.peakKiB" (.Values.sizing | default dict) | int }}
{{- $request := printf "%dMi" (mul 128 (div (add $peak 131071) 131072)) }}
{{- $limit := printf "%dGi" (div (add $peak (mul 2649 1024) 1048575) 1048576) }}
{{- include "capi-agent.sized" (dict "resources" .Values.resources "memory" (dict "requests" $request "limits" $limit)) }}
{{- end }}

{{/* What all identities share, if the defaults leave too little for other callers beside so many spokes. */}}
{{- define "capi-agent.sharedLimits" -}}
{{- $spokes := (.Values.sizing).spokes | int }}
{{- if gt $spokes 1500 -}}
- --limit-all-connections={{ add (mul 2 $spokes) 1000 }}
- --limit-all-watches-at-once={{ add (mul 3 $spokes) 1500 }}
- --limit-all-calls-at-once={{ add (mul 2 $spokes) 1000 }}
{{- end }}
{{- end }}

{{/* The container's resources, with computed memory where it is empty. */}}
{{- define "capi-agent.sized" -}}
{{- $resources := deepCopy (.resources | default dict) }}
{{- range $kind, $memory := .memory }}
{{- $of := get $resources $kind | default dict }}
{{- if and (hasKey $of "memory") (eq (toString (get $of "memory")) "") }}
{{- $_ := set $of "memory" $memory }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
