{{/* The figures are those of docs/sizing.md. The request is 64 MiB and half a MiB for each Node, in steps of 512 MiB; the limit is twice that, and at
least 2 GiB. */}}
{{- define "karpenter.resources" -}}
{{- $step := div (add 64 (div (add (int (.Values.sizing).nodes) 1) 2) 511) 512 }}
{{- include "karpenter.sized" (dict "resources" .Values.resources "memory" (dict "requests" (printf "%dMi" (mul 512 $step)) "limits" (printf "%dGi" (max 2 $step)))) }}
{{- end }}

{{/* The container's resources, with computed memory where it is empty. */}}
{{- define "karpenter.sized" -}}
{{- $resources := deepCopy (.resources | default dict) }}
{{- range $kind, $memory := .memory }}
{{- $of := get $resources $kind | default dict }}
{{- if and (hasKey $of "memory") (eq (toString (get $of "memory")) "") }}
{{- $_ := set $of "memory" $memory }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
