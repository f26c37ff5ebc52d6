{{/* The pod that runs Karpenter, or that only says what would be adopted. */}}
{{- define "karpenter.pod" -}}
{{- $enrollment := include "karpenter.enrollment" . }}
{{- $files := and (include "karpenter.tls" .) (not $enrollment) }}
{{- $metricsSecret := include "karpenter.metricsSecretName" . }}
metadata:
  labels:
    {{- include "karpenter.selectorLabels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: karpenter
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "karpenter.serviceAccountName" . }}
  {{- /* With a kubeconfig, nothing in the pod calls the API server of the cluster that it runs in. */}}
  automountServiceAccountToken: {{ not .Values.kubeconfig.secretName }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if .Values.planAdoption }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- if .Values.hostNetwork }}
  hostNetwork: true
  {{- end }}
  {{- with .Values.dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" .Values.hostNetwork) }}
  dnsPolicy: {{ . }}
  {{- end }}
  {{- with .Values.dnsConfig }}
  dnsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- with .Values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: karpenter
      image: {{ include "karpenter.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        {{- if .Values.planAdoption }}
        - plan-adoption
        {{- end }}
        - --agent-address={{ required "agent.address is required: where the agent listens, host:port" .Values.agent.address }}
        {{- with .Values.agent.serverName }}
        - --agent-server-name={{ . }}
        {{- end }}
        {{- if .Values.agent.plaintextLoopback }}
        - --agent-plaintext-loopback=true
        {{- end }}
        {{- if $enrollment }}
        - --agent-identity-secret={{ include "karpenter.enrollmentNamespace" . }}/{{ include "karpenter.identitySecretName" . }}
        - --agent-bootstrap-secret={{ include "karpenter.enrollmentNamespace" . }}/{{ include "karpenter.bootstrapSecretName" . }}
        {{- end }}
        {{- if $files }}
        - --agent-tls-cert-file=/etc/karpenter/agent-client/tls.crt
        - --agent-tls-key-file=/etc/karpenter/agent-client/tls.key
        - --agent-ca-file=/etc/karpenter/agent-client/ca.crt
        {{- end }}
        {{- with .Values.agent.timeout }}
        - --agent-timeout={{ . }}
        {{- end }}
        - --cluster-namespace={{ required "cluster.namespace is required: the namespace of the Cluster in the hub" .Values.cluster.namespace }}
        - --cluster-name={{ required "cluster.name is required: the name of this cluster's Cluster object" .Values.cluster.name }}
        {{- with .Values.launchTimeout }}
        - --launch-timeout={{ . }}
        {{- end }}
        {{- with .Values.claimSyncInterval }}
        - --claim-sync-interval={{ . }}
        {{- end }}
        {{- with .Values.hubUnreachableGracePeriod }}
        - --hub-unreachable-grace-period={{ . }}
        {{- end }}
        {{- with .Values.nodeRepairAfter }}
        - --node-repair-after={{ . }}
        {{- end }}
        {{- if eq (toString .Values.nodeRepairSkipRemediation) "false" }}
        - --node-repair-skip-remediation=false
        {{- end }}
        {{- if .Values.publishedNodePools }}
        - --published-node-pools
        {{- end }}
        {{- if not (include "karpenter.metricsSecure" .) }}
        - --metrics-secure=false
        {{- end }}
        {{- if $metricsSecret }}
        - --metrics-tls-cert-file=/etc/karpenter/metrics-tls/tls.crt
        - --metrics-tls-key-file=/etc/karpenter/metrics-tls/tls.key
        {{- end }}
        {{- with .Values.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: LOG_LEVEL
          value: {{ .Values.logLevel }}
        - name: METRICS_PORT
          value: {{ .Values.metrics.port | quote }}
        - name: HEALTH_PROBE_PORT
          value: {{ .Values.healthProbe.port | quote }}
        - name: LEADER_ELECTION_NAMESPACE
          value: {{ include "karpenter.leaseNamespace" . }}
        - name: LEADER_ELECTION_NAME
          value: {{ .Values.leaderElection.name | quote }}
        - name: BATCH_MAX_DURATION
          value: {{ .Values.settings.batchMaxDuration }}
        - name: BATCH_IDLE_DURATION
          value: {{ .Values.settings.batchIdleDuration }}
        - name: PREFERENCE_POLICY
          value: {{ .Values.settings.preferencePolicy }}
        - name: MIN_VALUES_POLICY
          value: {{ .Values.settings.minValuesPolicy }}
        - name: IGNORE_DRA_REQUESTS
          value: {{ ne (toString .Values.settings.ignoreDRARequests) "false" | quote }}
        - name: FEATURE_GATES
          {{- $gates := list }}
          {{- range $gate, $on := .Values.settings.featureGates }}
          {{- $gates = append $gates (printf "%s=%t" $gate $on) }}
          {{- end }}
          value: {{ join "," $gates | quote }}
        - name: CPU_REQUESTS
          valueFrom:
            resourceFieldRef:
              containerName: karpenter
              resource: requests.cpu
              divisor: 1m
        - name: MEMORY_LIMIT
          valueFrom:
            resourceFieldRef:
              containerName: karpenter
              resource: limits.memory
        {{- if .Values.kubeconfig.secretName }}
        - name: KUBECONFIG
          value: /etc/karpenter/kubeconfig/{{ .Values.kubeconfig.key }}
        {{- end }}
        {{- with .Values.tracing }}
        {{- if .endpoint }}
        - name: OTEL_EXPORTER_OTLP_ENDPOINT
          value: {{ .endpoint | quote }}
        {{- with .sampler }}
        - name: OTEL_TRACES_SAMPLER
          value: {{ . | quote }}
        {{- end }}
        {{- with .samplerArg }}
        - name: OTEL_TRACES_SAMPLER_ARG
          value: {{ . | quote }}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: metrics
          containerPort: {{ .Values.metrics.port }}
          protocol: TCP
        - name: health
          containerPort: {{ .Values.healthProbe.port }}
          protocol: TCP
      {{- if not .Values.planAdoption }}
      livenessProbe:
        httpGet:
          path: /healthz
          port: health
        initialDelaySeconds: 30
        timeoutSeconds: 30
      readinessProbe:
        httpGet:
          path: /readyz
          port: health
        initialDelaySeconds: 5
        timeoutSeconds: 30
      {{- end }}
      resources:
        {{- include "karpenter.resources" . | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      {{- if or $files $metricsSecret .Values.kubeconfig.secretName .Values.extraVolumeMounts }}
      volumeMounts:
        {{- if $metricsSecret }}
        - name: metrics-tls
          mountPath: /etc/karpenter/metrics-tls
          readOnly: true
        {{- end }}
        {{- if $files }}
        - name: agent-client
          mountPath: /etc/karpenter/agent-client
          readOnly: true
        {{- end }}
        {{- if .Values.kubeconfig.secretName }}
        - name: kubeconfig
          mountPath: /etc/karpenter/kubeconfig
          readOnly: true
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
    {{- if and .Values.sidecars (not .Values.planAdoption) }}
    {{- toYaml .Values.sidecars | nindent 4 }}
    {{- end }}
  {{- if or $files $metricsSecret .Values.kubeconfig.secretName .Values.extraVolumes }}
  volumes:
    {{- if $metricsSecret }}
    - name: metrics-tls
      secret:
        secretName: {{ $metricsSecret }}
    {{- end }}
    {{- if $files }}
    - name: agent-client
      {{- include "karpenter.tlsVolume" . | trim | nindent 6 }}
    {{- end }}
    {{- if .Values.kubeconfig.secretName }}
    - name: kubeconfig
      secret:
        secretName: {{ .Values.kubeconfig.secretName }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- with .Values.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "karpenter.selectorLabels" . | nindent 10 }}
    {{- end }}
{{- end }}
