{{/* What the operator may do in the namespaces of the pools. What it grants to daemons it has to have itself. */}}
{{- define "kvpool.operator.rules" -}}
- apiGroups: [kvpool.dev]
  resources: [kvpools]
  verbs: [get, list, watch, patch]
- apiGroups: [kvpool.dev]
  resources: [kvpools/finalizers]
  verbs: [update]
- apiGroups: [kvpool.dev]
  resources: [kvpools/status]
  verbs: [get, patch]
- apiGroups: [kvpool.dev]
  resources: [kvpoolnodes]
  verbs: [get, list, watch, create, patch, delete]
# Only to hand it on: a daemon writes the status of its node.
- apiGroups: [kvpool.dev]
  resources: [kvpoolnodes/status]
  verbs: [get, patch, update]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- if .Values.dra.enabled }}
# What engines' pods name to get a pool.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}

{{/* What it makes in its own namespace, where the daemons run, and nowhere else: (dict "context" . "verbs" (list VERB...)). */}}
{{- define "kvpool.operator.daemonRules" -}}
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [{{ join ", " .verbs }}]
- apiGroups: [apps]
  resources: [daemonsets]
  verbs: [{{ join ", " .verbs }}]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [{{ join ", " .verbs }}]
{{- if .context.Values.dra.enabled }}
# For the tiers of a DeviceClass.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [{{ join ", " .verbs }}]
{{- end }}
{{- end }}

{{/* What it may do to objects that belong to no namespace. */}}
{{- define "kvpool.operator.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.dra.enabled }}
# The pools as devices; a policy lets it touch no other driver's.
- apiGroups: [resource.k8s.io]
  resources: [resourceslices]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if and .Values.webhook.enabled (not .Values.webhook.certManager.enabled) }}
# To put the authority of its own certificate there.
- apiGroups: [admissionregistration.k8s.io]
  resources: [mutatingwebhookconfigurations]
  resourceNames: [{{ include "kvpool.clustername" . }}]
  verbs: [get, patch]
{{- end }}
{{- end }}

{{- define "kvpool.api.rules" -}}
- apiGroups: [kvpool.dev]
  resources: [kvpools, kvpoolnodes]
  verbs: [get, list, watch]
{{- end }}

{{/* What the DRA driver may do in the namespaces of claims and pools. */}}
{{- define "kvpool.dra.rules" -}}
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [get]
# Conditions of the devices that it prepares.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims/status]
  verbs: [patch]
- apiGroups: [kvpool.dev]
  resources: [kvpools]
  verbs: [get]
{{- end }}
