{{/* Names. */}}
{{- define "kvpool.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvpool.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "kvpool.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of objects that belong to no namespace: two releases of one name in two namespaces must not meet. */}}
{{- define "kvpool.clustername" -}}
{{- printf "%s-%s" (include "kvpool.fullname" .) .Release.Namespace | trimSuffix "-" }}
{{- end }}

{{- define "kvpool.operator.serviceAccount" -}}
{{- default (printf "%s-operator" (include "kvpool.fullname" .)) .Values.operator.serviceAccount.name }}
{{- end }}

{{- define "kvpool.api.serviceAccount" -}}
{{- default (printf "%s-api" (include "kvpool.fullname" .)) .Values.api.serviceAccount.name }}
{{- end }}

{{- define "kvpool.dra.serviceAccount" -}}
{{- default (printf "%s-dra" (include "kvpool.fullname" .)) .Values.dra.serviceAccount.name }}
{{- end }}

{{/* The folder of the file backend, without what may stand behind it. */}}
{{- define "kvpool.dra.folder" -}}
{{- .Values.dra.backend | trimPrefix "file:" | splitList "?" | first }}
{{- end }}

{{- define "kvpool.webhook.service" -}}
{{- printf "%s-webhook" (include "kvpool.fullname" .) }}
{{- end }}

{{/* Labels: (dict "context" . "component" "operator"). */}}
{{- define "kvpool.selector" -}}
app.kubernetes.io/name: {{ include "kvpool.name" .context }}
app.kubernetes.io/instance: {{ .context.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvpool.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .context.Chart.Name .context.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "kvpool.selector" . }}
app.kubernetes.io/version: {{ .context.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvpool
app.kubernetes.io/managed-by: {{ .context.Release.Service }}
{{- with .context.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvpool.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvpool.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the `restricted` Pod Security level asks for, and a root file system that can't be written. */}}
{{- define "kvpool.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvpool.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where a pod may run, from the values of its component. */}}
{{- define "kvpool.placement" -}}
nodeSelector:
  kubernetes.io/os: linux
{{- with .nodeSelector }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Egress that everything here needs: the Kubernetes API and names. */}}
{{- define "kvpool.egress" -}}
- ports:
{{- range .Values.networkPolicy.apiServerPorts }}
  - port: {{ . }}
    protocol: TCP
{{- end }}
- ports:
  - port: 53
    protocol: UDP
  - port: 53
    protocol: TCP
{{- end }}
