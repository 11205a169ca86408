{{- define "helexa.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "helexa.labels" -}}
app.kubernetes.io/name: helexa
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "helexa.selector" -}}
app.kubernetes.io/name: helexa
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "helexa.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "helexa.keys" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "helexa.name" .)) }}
{{- end }}

{{- define "helexa.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# With the default, each start makes all files of the volumes writable for the group. A node then uses no saved prompts.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "helexa.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
