{{- define "proxy-ctl.labels" -}}
k8s-app: proxy-ctl
{{- end }}

{{- define "proxy-ctl.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* KubeProxyConfiguration: the chart's own fields below those of the values. */}}
{{- define "proxy-ctl.config" -}}
{{- $open := .Values.monitoring.podMonitor.exposeToAnyone -}}
{{- if and .Values.monitoring.podMonitor.enabled (not $open) (not .Values.config.metricsBindAddress) -}}
{{- fail "monitoring.podMonitor.enabled: Prometheus can reach the metrics only where anyone who reaches a node can read the names and traffic of all Services. Accept that with monitoring.podMonitor.exposeToAnyone=true, or set config.metricsBindAddress yourself" -}}
{{- end -}}
{{- $mode := .Values.config.mode | default "ebpf" -}}
{{- if not (or .Values.privileged (eq $mode "ebpf")) -}}
{{- fail (printf "privileged: mode %s writes kernel parameters and rules of netfilter while it runs, which takes a privileged container; without one there is mode ebpf" $mode) -}}
{{- end -}}
{{- $metrics := ternary "0.0.0.0:10249" "127.0.0.1:10249" $open -}}
{{- $own := dict
  "apiVersion" "kubeproxy.config.k8s.io/v1alpha1"
  "kind" "KubeProxyConfiguration"
  "clientConnection" (dict "kubeconfig" "/var/lib/kube-proxy/kubeconfig.conf")
  "metricsBindAddress" $metrics
  "mode" "ebpf" -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.config)) }}
{{- end }}

{{/* The files below /var/lib/kube-proxy. */}}
{{- define "proxy-ctl.configData" -}}
config.conf: |
  {{- include "proxy-ctl.config" . | nindent 2 }}
kubeconfig.conf: |
  apiVersion: v1
  kind: Config
  clusters:
    - name: default
      cluster:
        certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
        server: {{ required "apiServer is required: where the API server is reached without this proxy, such as https://10.0.0.1:6443" .Values.apiServer }}
  users:
    - name: default
      user:
        tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
  contexts:
    - name: default
      context:
        cluster: default
        user: default
  current-context: default
{{- end }}

{{- define "proxy-ctl.configName" -}}
proxy-ctl-{{ include "proxy-ctl.configData" . | sha256sum | trunc 10 }}
{{- end }}

{{/* The port of an address that ends in one. */}}
{{- define "proxy-ctl.port" -}}
{{ regexFind "[0-9]+$" . }}
{{- end }}

{{- define "proxy-ctl.healthz" -}}
{{ .Values.config.healthzBindAddress | default "0.0.0.0:10256" }}
{{- end }}

{{/* A probe; kubelet asks on loopback where only that is listened on. */}}
{{- define "proxy-ctl.probe" -}}
{{- $address := include "proxy-ctl.healthz" .root -}}
httpGet:
  path: {{ .path }}
  port: {{ include "proxy-ctl.port" $address }}
{{- if or (hasPrefix "127." $address) (hasPrefix "[::1]" $address) }}
  host: {{ regexReplaceAll "^\\[?([^\\]]*?)\\]?:[0-9]+$" $address "${1}" | quote }}
{{- end }}
{{- end }}

{{- define "proxy-ctl.nodeName" -}}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
{{- end }}
