{{- define "intarsia.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "intarsia.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "intarsia.selectorLabels" -}}
app.kubernetes.io/name: {{ include "intarsia.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "intarsia.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "intarsia.selectorLabels" . }}
{{- end }}

{{- define "intarsia.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "intarsia.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "intarsia.image" -}}
{{- $default := printf "%s-%s" .Chart.AppVersion (ternary "cuda" "cpu" .Values.gpu.enabled) }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default $default .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "intarsia.cacheClaim" -}}
{{- if .Values.cache.existingClaim }}
{{- .Values.cache.existingClaim }}
{{- else if .Values.cache.create }}
{{- include "intarsia.fullname" . }}-cache
{{- end }}
{{- end }}
