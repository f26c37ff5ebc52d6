{{- define "karpenter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "karpenter.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "karpenter.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "karpenter.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "karpenter.selectorLabels" -}}
app.kubernetes.io/name: {{ include "karpenter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "karpenter.labels" -}}
{{ include "karpenter.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: karpenter-capi
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "karpenter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "karpenter.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "karpenter.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "karpenter.tlsSecretName" -}}
{{- default (printf "%s-agent-client" (include "karpenter.fullname" .)) .Values.tls.secretName }}
{{- end }}

{{- define "karpenter.leaseNamespace" -}}
{{- default .Release.Namespace .Values.leaderElection.namespace }}
{{- end }}

{{/* Whether the agent is reached over TLS: "true" or nothing. */}}
{{- define "karpenter.tls" -}}
{{- if not .Values.agent.plaintextLoopback -}}
{{ include "karpenter.overNetwork" . }}
{{- end }}
{{- end }}

{{/* Whether the agent has a network address: "true" or nothing. */}}
{{- define "karpenter.overNetwork" -}}
{{- if not (hasPrefix "unix://" .Values.agent.address) -}}
true
{{- end }}
{{- end }}

{{/* Whether metrics are served over HTTPS, to those who may read them: "true" or nothing. Values of an older release do not say. */}}
{{- define "karpenter.metricsSecure" -}}
{{- if ne (toString .Values.metrics.secure) "false" -}}
{{- if .Values.kubeconfig.secretName -}}
{{- fail "metrics.secure must be false with kubeconfig.secretName: the shim would send the tokens of the hub's readers of metrics to the spoke's API server" -}}
{{- end -}}
true
{{- end }}
{{- end }}

{{/* The secret with the certificate of the metrics, when they have one of their own. */}}
{{- define "karpenter.metricsSecretName" -}}
{{- if and (not .Values.planAdoption) (include "karpenter.metricsSecure" .) }}
{{- with .Values.metrics.tls }}{{ .secretName }}{{ end }}
{{- end }}
{{- end }}
