{{- define "capi-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Services have it with a suffix of up to nine characters, and a Service's name has at most 63. */}}
{{- define "capi-agent.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 54 | trimSuffix "-" }}
{{- else if contains (include "capi-agent.name" .) .Release.Name }}
{{- .Release.Name | trunc 54 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "capi-agent.name" .) | trunc 54 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* For objects outside the release's namespace, where another release may have the same full name. Neither a namespace nor what is put before
this name has a dot, so no two releases share one. */}}
{{- define "capi-agent.hubName" -}}
{{ include "capi-agent.fullname" . }}.{{ .Release.Namespace }}
{{- end }}

{{- define "capi-agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "capi-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "capi-agent.labels" -}}
{{ include "capi-agent.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: karpenter-capi
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "capi-agent.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "capi-agent.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "capi-agent.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "capi-agent.tlsSecretName" -}}
{{- default (printf "%s-tls" (include "capi-agent.fullname" .)) .Values.tls.secretName }}
{{- end }}

{{/* The volume that has the agent's certificate. */}}
{{- define "capi-agent.tlsVolume" -}}
{{- if .Values.tls.volume }}
{{- if .Values.tls.volume.name }}
{{- fail "tls.volume.name: the chart names the volume itself, leave the name out" }}
{{- end }}
{{- if or .Values.tls.certManager.enabled .Values.tls.secretName }}
{{- fail "tls.volume excludes tls.certManager.enabled and tls.secretName: set the first to false and leave the second empty" }}
{{- end }}
{{- include "capi-agent.authorities" . }}
{{- toYaml .Values.tls.volume }}
{{- else if include "capi-agent.authorities" . }}
projected:
  sources:
    - secret:
        name: {{ include "capi-agent.tlsSecretName" . }}
        items:
          - {key: tls.crt, path: tls.crt}
          - {key: tls.key, path: tls.key}
    {{- include "capi-agent.authorities" . | trim | nindent 4 }}
{{- else -}}
secret:
  secretName: {{ include "capi-agent.tlsSecretName" . }}
{{- end }}
{{- end }}

{{/* The source of the authorities, when they are not those of the secret with the certificate. Values of an older release do not say. */}}
{{- define "capi-agent.authorities" -}}
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

{{/* The ConfigMap with the policy, or nothing if the agent is given another one. */}}
{{- define "capi-agent.policyName" -}}
{{- $others := list }}
{{- range .Values.extraArgs }}
{{- if regexMatch "^--policy(-file)?(=|$)" (toString .) }}
{{- $others = append $others (printf "extraArgs has %s" .) }}
{{- end }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if has .name (list "CAPI_AGENT_POLICY" "CAPI_AGENT_POLICY_FILE") }}
{{- $others = append $others (printf "extraEnv has %s" .name) }}
{{- end }}
{{- end }}
{{- if and .Values.policy $others }}
{{- fail (printf "%s: set policy to null, so that the chart does not pass a policy of its own" (first $others)) }}
{{- end }}
{{- if not (or (kindIs "invalid" .Values.policy) $others) }}
{{- include "capi-agent.fullname" . }}-policy
{{- end }}
{{- end }}

{{/* The secret with the authority that the agent issues certificates with, when it does. */}}
{{- define "capi-agent.issuerSecretName" -}}
{{- with .Values.onboarding }}
{{- if .enabled }}
{{- if .issuerSecretName }}
{{- .issuerSecretName }}
{{- else if and $.Values.tls.certManager.enabled $.Values.tls.certManager.issuer.create }}
{{- include "capi-agent.fullname" $ }}-ca
{{- else }}
{{- fail "onboarding.issuerSecretName is required unless tls.certManager.issuer creates the authority: the secret with the authority's tls.crt and tls.key" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "capi-agent.issuerRef" -}}
{{- with .Values.tls.certManager.issuer -}}
{{- if .create -}}
name: {{ include "capi-agent.fullname" $ }}-ca
kind: Issuer
group: cert-manager.io
{{- else -}}
name: {{ required "tls.certManager.issuer.name is required when issuer.create is false" .name }}
kind: {{ .kind }}
group: {{ .group }}
{{- end }}
{{- end }}
{{- end }}

{{/* The namespaces that the agent is confined to, as a JSON list; empty when it sees all. */}}
{{- define "capi-agent.namespaces" -}}
{{- $namespaces := .Values.namespaces }}
{{- range .Values.clusters }}
{{- $namespaces = append $namespaces (splitList "/" . | first) }}
{{- end }}
{{- $namespaces | uniq | sortAlpha | toJson }}
{{- end }}

{{/* What the agent may do where its Clusters are. */}}
{{- define "capi-agent.rules" -}}
- apiGroups: [cluster.x-k8s.io]
  resources: [clusters]
  verbs: [get, list, watch]
- apiGroups: [cluster.x-k8s.io]
  resources: [machinedeployments, machinesets]
  verbs: [get, list, watch, patch]
- apiGroups: [cluster.x-k8s.io]
  resources: [machines]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [machineclaims]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [machineclaims/status]
  verbs: [update, patch]
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [spokes]
  # To name an owner takes the right to delete where the API server has OwnerReferencesPermissionEnforcement.
  verbs: [get, list, create, update, delete]
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [spokes/status]
  verbs: [patch]
{{- if (.Values.nodePools).publish }}
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [nodepoolsets]
  verbs: [get, list, watch]
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [nodepoolsets/status]
  verbs: [patch]
- apiGroups: [agent.karpenter.cluster.x-k8s.io]
  resources: [spokes]
  verbs: [watch]
{{- end }}
{{- with .Values.rbac }}
{{- if .infrastructureGroups }}
- apiGroups: {{ toJson .infrastructureGroups }}
  resources: {{ toJson .infrastructureResources }}
  verbs: [get, list, watch]
{{- end }}
{{- end }}
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* A CEL expression: who writes is none of these users and groups. */}}
{{- define "capi-agent.notExempt" -}}
!(request.userInfo.username in {{ include "capi-agent.celList" .users }})
{{- with .groups }} && !request.userInfo.?groups.orValue([]).exists(g, g in {{ include "capi-agent.celList" . }}){{ end }}
{{- end }}

{{/* A list of strings in CEL. */}}
{{- define "capi-agent.celList" -}}
[{{ range $i, $item := . }}{{ if $i }}, {{ end }}'{{ $item }}'{{ end }}]
{{- end }}

{{/* A CEL list: Cluster API's annotations that the agent sets and removes. */}}
{{- define "capi-agent.annotations" -}}
['cluster.x-k8s.io/paused', 'cluster.x-k8s.io/delete-machine', 'machine.cluster.x-k8s.io/exclude-node-draining',
{{- " " }}'machine.cluster.x-k8s.io/exclude-wait-for-node-volume-detach', 'cluster.x-k8s.io/skip-remediation',
{{- " " }}'pre-terminate.delete.hook.machine.cluster.x-k8s.io/karpenter-capi']
{{- end }}

{{/* A CEL expression: the MachineDeployment that is named has a ledger, and it is its own. */}}
{{- define "capi-agent.hasLedger" -}}
{{ . }}.metadata.?annotations[?'agent.karpenter.cluster.x-k8s.io/ledger'].orValue('').contains('"of":"' + {{ . }}.metadata.namespace + '/' + {{ . }}.metadata.name + '"')
{{- end }}

{{/* Whether metrics are served over HTTPS, to those who may read them: "true" or nothing. Values of an older release do not say. */}}
{{- define "capi-agent.metricsSecure" -}}
{{- if ne (toString .Values.metrics.secure) "false" -}}
true
{{- end }}
{{- end }}

{{/* The secret with the certificate of the metrics, when they have one of their own. */}}
{{- define "capi-agent.metricsSecretName" -}}
{{- if include "capi-agent.metricsSecure" . }}
{{- with .Values.metrics.tls }}{{ .secretName }}{{ end }}
{{- end }}
{{- end }}

{{/* What the monitor with a name in the values of metrics scrapes. Root is the chart's context. */}}
{{- define "capi-agent.metricsEndpoint" -}}
{{- $monitor := get .root.Values.metrics .name -}}
port: metrics
path: /metrics
interval: {{ $monitor.interval }}
# Labels namespace and cluster name objects of the hub, not the target.
honorLabels: true
{{- with $monitor.relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if include "capi-agent.metricsSecure" .root }}
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
  {{- else }}
  {{- $own := include "capi-agent.metricsSecretName" .root }}
  {{- if and .root.Values.tls.volume (not $own) }}
  {{- fail (printf "metrics.%s.tlsConfig is required with tls.volume: Prometheus cannot read the authority of the certificate from a volume of the agent" .name) }}
  {{- end }}
  ca:
    secret:
      name: {{ $own | default (include "capi-agent.tlsSecretName" .root) }}
      key: ca.crt
  serverName: {{ include "capi-agent.fullname" .root }}{{ if $own }}-metrics{{ end }}.{{ .root.Release.Namespace }}.svc
  {{- end }}
{{- end }}
{{- end }}

{{/*
Selector of the labels that the Prometheus operator gives to the targets of the release's monitor. Empty without a monitor, or if
its relabelings may change these labels.
*/}}
{{- define "capi-agent.ownTargets" -}}
{{- $services := .Values.metrics.serviceMonitor | default dict -}}
{{- $pods := .Values.metrics.podMonitor | default dict -}}
{{- $monitor := $services -}}
{{- $job := printf "%s-metrics" (include "capi-agent.fullname" .) -}}
{{- if $pods.enabled -}}
{{- $monitor = $pods -}}
{{- $job = printf "%s/%s" .Release.Namespace (include "capi-agent.fullname" .) -}}
{{- end -}}
{{- $known := $monitor.enabled -}}
{{- range concat ($monitor.relabelings | default list) ($monitor.metricRelabelings | default list) -}}
{{- if or (has .targetLabel (list "namespace" "job")) (hasPrefix "label" (.action | default "" | lower)) -}}
{{- $known = false -}}
{{- end -}}
{{- end -}}
{{- if $known -}}
{{ printf "{namespace=%q,job=%q}" .Release.Namespace $job }}
{{- end -}}
{{- end }}
