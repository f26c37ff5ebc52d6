{{- define "karpenter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* A Service has it with a suffix of eight characters, and a Service's name has at most 63. */}}
{{- define "karpenter.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 55 | trimSuffix "-" }}
{{- else if contains (include "karpenter.name" .) .Release.Name }}
{{- .Release.Name | trunc 55 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "karpenter.name" .) | trunc 55 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/*
The name of objects outside the release's namespace. Those of another Karpenter may have the release's name, and a
tool that does not heed owners would replace them.
*/}}
{{- define "karpenter.clusterName" -}}
{{ include "karpenter.fullname" . }}.{{ .Release.Namespace }}
{{- end }}

{{/* The name of objects in a namespace, with root, the chart's context. */}}
{{- define "karpenter.nameIn" -}}
{{- include (eq .namespace .root.Release.Namespace | ternary "karpenter.fullname" "karpenter.clusterName") .root }}
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

{{/* The name of the job that plans an adoption. A job cannot be changed, and Argo CD installs every version as revision 1. */}}
{{- define "karpenter.planName" -}}
{{- $pod := include "karpenter.pod" . | sha256sum | trunc 8 }}
{{- printf "%s-plan-adoption-%d-%s" (include "karpenter.fullname" . | trunc 34 | trimSuffix "-") (int .Release.Revision) $pod }}
{{- end }}

{{/* The volume that has the certificate for the agent. */}}
{{- define "karpenter.tlsVolume" -}}
{{- if .Values.tls.volume }}
{{- if .Values.tls.volume.name }}
{{- fail "tls.volume.name: the chart names the volume itself, leave the name out" }}
{{- end }}
{{- if .Values.tls.secretName }}
{{- fail "tls.volume excludes tls.secretName: leave one of them empty" }}
{{- end }}
{{- include "karpenter.authorities" . }}
{{- toYaml .Values.tls.volume }}
{{- else if include "karpenter.authorities" . }}
projected:
  sources:
    - secret:
        name: {{ include "karpenter.tlsSecretName" . }}
        items:
          - {key: tls.crt, path: tls.crt}
          - {key: tls.key, path: tls.key}
    {{- include "karpenter.authorities" . | trim | nindent 4 }}
{{- else -}}
secret:
  secretName: {{ include "karpenter.tlsSecretName" . }}
{{- end }}
{{- end }}

{{/* The source of the authorities, when they are not those of the secret with the certificate. Values of an older release do not say. */}}
{{- define "karpenter.authorities" -}}
{{- with .Values.tls.authorities }}
{{- if or .configMapName .secretName }}
{{- if and .configMapName .secretName }}
{{- fail "tls.authorities.configMapName excludes tls.authorities.secretName: leave one of them empty" }}
{{- end }}
{{- if $.Values.tls.volume }}
{{- fail "tls.volume excludes tls.authorities: the volume has the authorities in ca.crt" }}
{{- end }}
- {{ ternary "configMap" "secret" (not .secretName) }}:
    name: {{ default .configMapName .secretName }}
    items:
      - {key: {{ default "ca.crt" .key }}, path: ca.crt}
{{- end }}
{{- end }}
{{- end }}

{{- define "karpenter.leaseNamespace" -}}
{{- if and .Values.kubeconfig.secretName (not .Values.leaderElection.namespace) }}
{{- fail "leaderElection.namespace is required with kubeconfig.secretName: name a namespace of the spoke, such as kube-system" }}
{{- end }}
{{- default .Release.Namespace .Values.leaderElection.namespace }}
{{- end }}

{{/* Whether the agent is reached over TLS: "true" or nothing. */}}
{{- define "karpenter.tls" -}}
{{- if not .Values.agent.plaintextLoopback -}}
{{ include "karpenter.overNetwork" . }}
{{- end }}
{{- end }}

{{/* Whether the shim gets its certificate from the agent: "true" or nothing. Values of an older release do not say. */}}
{{- define "karpenter.enrollment" -}}
{{- if dig "enrollment" "enabled" false .Values.agent -}}
{{- if not (include "karpenter.tls" .) -}}
{{- fail "agent.enrollment.enabled has no effect with a unix socket or agent.plaintextLoopback, which take no certificates: set it to false" -}}
{{- end -}}
{{- if include "karpenter.authorities" . -}}
{{- fail "tls.authorities excludes agent.enrollment.enabled, with which the agent sends the authorities to trust: leave its names empty" -}}
{{- end -}}
{{- if or .Values.tls.secretName .Values.tls.volume -}}
{{- fail "tls.secretName and tls.volume exclude agent.enrollment.enabled, with which the agent issues the certificate: set one of them to its default" -}}
{{- end -}}
{{- if eq (include "karpenter.identitySecretName" .) (include "karpenter.bootstrapSecretName" .) -}}
{{- fail "agent.enrollment.identitySecretName and agent.enrollment.bootstrapSecretName are the same: use a separate secret for the shim's own key" -}}
{{- end -}}
true
{{- end }}
{{- end }}

{{/* The namespace, in the spoke, of the secrets of the enrollment. */}}
{{- define "karpenter.enrollmentNamespace" -}}
{{- if .Values.kubeconfig.secretName }}
{{- default (include "karpenter.leaseNamespace" .) .Values.agent.enrollment.namespace }}
{{- else }}
{{- default .Release.Namespace .Values.agent.enrollment.namespace }}
{{- end }}
{{- end }}

{{- define "karpenter.identitySecretName" -}}
{{- default (printf "%s-agent-identity" (include "karpenter.fullname" .)) .Values.agent.enrollment.identitySecretName }}
{{- end }}

{{- define "karpenter.bootstrapSecretName" -}}
{{- default "karpenter-agent-bootstrap" .Values.agent.enrollment.bootstrapSecretName }}
{{- end }}

{{/* Whether the agent has a network address: "true" or nothing. */}}
{{- define "karpenter.overNetwork" -}}
{{- if not (hasPrefix "unix://" .Values.agent.address) -}}
true
{{- end }}
{{- end }}

{{/* Whether to create roles: "true" or nothing. In the hub they would give rights there, which the shim does not need. */}}
{{- define "karpenter.rbac" -}}
{{- if and .Values.rbac.create (not .Values.kubeconfig.secretName) -}}
true
{{- end }}
{{- end }}

{{/* Whether metrics are served over HTTPS, to authorized readers: "true" or nothing. Values of an older release do not say. */}}
{{- define "karpenter.metricsSecure" -}}
{{- if ne (toString .Values.metrics.secure) "false" -}}
{{- if .Values.kubeconfig.secretName -}}
{{- fail "metrics.secure must be false with kubeconfig.secretName: the spoke's API server would get the tokens of the hub's readers of metrics" -}}
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

{{/* What the monitor with a name in the values of metrics scrapes. Root is the chart's context. */}}
{{- define "karpenter.metricsEndpoint" -}}
{{- $monitor := get .root.Values.metrics .name -}}
port: metrics
path: /metrics
interval: {{ $monitor.interval }}
{{- with $monitor.relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if include "karpenter.metricsSecure" .root }}
scheme: https
{{- if $monitor.authorization }}
authorization:
  {{- toYaml $monitor.authorization | nindent 2 }}
{{- else if eq .name "podMonitor" }}
{{- fail "metrics.podMonitor.authorization is required with metrics.secure: a PodMonitor cannot name a token file, so name a secret with a token that may get /metrics" }}
{{- else }}
bearerTokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
{{- end }}
tlsConfig:
  {{- if $monitor.tlsConfig }}
  {{- toYaml $monitor.tlsConfig | nindent 2 }}
  {{- else if include "karpenter.metricsSecretName" .root }}
  ca:
    secret:
      name: {{ include "karpenter.metricsSecretName" .root }}
      key: ca.crt
  serverName: {{ include "karpenter.fullname" .root }}-metrics.{{ .root.Release.Namespace }}.svc
  {{- else }}
  insecureSkipVerify: true # the shim makes its certificate itself
  {{- end }}
{{- end }}
{{- end }}

{{/*
Selector of the labels that the Prometheus operator gives to the targets of the release's monitor. Empty without a monitor, if its
relabelings may change these labels, or while an adoption is planned: then another provider's Karpenter runs.
*/}}
{{- define "karpenter.ownTargets" -}}
{{- $services := .Values.metrics.serviceMonitor | default dict -}}
{{- $pods := .Values.metrics.podMonitor | default dict -}}
{{- $monitor := $services -}}
{{- $job := printf "%s-metrics" (include "karpenter.fullname" .) -}}
{{- if $pods.enabled -}}
{{- $monitor = $pods -}}
{{- $job = printf "%s/%s" .Release.Namespace (include "karpenter.fullname" .) -}}
{{- end -}}
{{- $known := and $monitor.enabled (not .Values.planAdoption) -}}
{{- range concat ($monitor.relabelings | default list) ($monitor.metricRelabelings | default list) -}}
{{- if or (has .targetLabel (list "namespace" "job")) (hasPrefix "label" (.action | default "" | lower)) -}}
{{- $known = false -}}
{{- end -}}
{{- end -}}
{{- if $known -}}
{{ printf "{namespace=%q,job=%q}" .Release.Namespace $job }}
{{- end -}}
{{- end }}
