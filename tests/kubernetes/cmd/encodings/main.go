// Writes objects in JSON and in protobuf with Kubernetes' own serializers, every field set that proxy-ctl reads:
//
//	go run ./cmd/encodings ../../proxy-ctl/src/kubernetes/recorded
package main

import (
	"bytes"
	"log"
	"os"
	"path/filepath"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
)

func to[T any](value T) *T { return &value }

func metadata(name string) meta.ObjectMeta {
	created := meta.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return meta.ObjectMeta{
		Name: name, GenerateName: "x-", Namespace: "shop", UID: "1b4e28ba", ResourceVersion: "4711", Generation: 3,
		CreationTimestamp: created, DeletionTimestamp: to(created), DeletionGracePeriodSeconds: to(int64(30)),
		Labels: map[string]string{
			"kubernetes.io/service-name": "web", "topology.kubernetes.io/zone": "z1",
		},
		Annotations: map[string]string{
			"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05.678Z",
		},
		OwnerReferences: []meta.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: "web", Controller: to(true)}},
		Finalizers:      []string{"a/b"},
		ManagedFields: []meta.ManagedFieldsEntry{{
			Manager: "m", Operation: "Apply", APIVersion: "v1", Time: to(created),
			FieldsV1: meta.NewFieldsV1(`{"f:spec":{}}`),
		}},
	}
}

func bare(name string) meta.ObjectMeta {
	return meta.ObjectMeta{Name: name, ResourceVersion: "12"}
}

var list = meta.ListMeta{ResourceVersion: "4712", Continue: "next", RemainingItemCount: to(int64(7))}

func services() []core.Service {
	return []core.Service{
		{
			ObjectMeta: metadata("web"),
			Spec: core.ServiceSpec{
				Ports: []core.ServicePort{
					{Name: "http", Protocol: "TCP", AppProtocol: to("http"), Port: 80, TargetPort: intstr.FromString("web"), NodePort: 30080},
					{Name: "dns", Protocol: "UDP", Port: 53, TargetPort: intstr.FromInt32(5353)},
				},
				Selector: map[string]string{"app": "web"}, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1"},
				Type: "LoadBalancer", ExternalIPs: []string{"192.0.2.1", "2001:db8::1"}, SessionAffinity: "ClientIP",
				LoadBalancerIP: "198.51.100.9", LoadBalancerSourceRanges: []string{"203.0.113.0/25"}, ExternalName: "n",
				ExternalTrafficPolicy: "Local", HealthCheckNodePort: 32000, PublishNotReadyAddresses: true,
				SessionAffinityConfig: &core.SessionAffinityConfig{ClientIP: &core.ClientIPConfig{TimeoutSeconds: to(int32(60))}},
				IPFamilyPolicy:        to(core.IPFamilyPolicyPreferDualStack), IPFamilies: []core.IPFamily{"IPv4", "IPv6"},
				AllocateLoadBalancerNodePorts: to(false), LoadBalancerClass: to("c/d"),
				InternalTrafficPolicy: to(core.ServiceInternalTrafficPolicyLocal), TrafficDistribution: to("PreferClose"),
			},
			Status: core.ServiceStatus{
				LoadBalancer: core.LoadBalancerStatus{Ingress: []core.LoadBalancerIngress{
					{IP: "198.51.100.1", IPMode: to(core.LoadBalancerIPModeVIP), Ports: []core.PortStatus{{Port: 80, Protocol: "TCP"}}},
					{IP: "198.51.100.3", IPMode: to(core.LoadBalancerIPModeProxy)},
					{Hostname: "lb.example"},
				}},
				Conditions: []meta.Condition{{Type: "Ready", Status: "True", LastTransitionTime: meta.Unix(1, 0)}},
			},
		},
		{ObjectMeta: bare("headless"), Spec: core.ServiceSpec{ClusterIP: "None"}},
	}
}

func slices() []discovery.EndpointSlice {
	return []discovery.EndpointSlice{
		{
			ObjectMeta: metadata("web-1"), AddressType: "IPv4",
			Endpoints: []discovery.Endpoint{
				{
					Addresses:  []string{"10.0.0.1", "10.0.0.9"},
					Conditions: discovery.EndpointConditions{Ready: to(false), Serving: to(true), Terminating: to(true)},
					Hostname:   to("h"), TargetRef: &core.ObjectReference{Kind: "Pod", Name: "web-x"},
					DeprecatedTopology: map[string]string{"a": "b"}, NodeName: to("node-1"), Zone: to("z1"),
					Hints: &discovery.EndpointHints{
						ForZones: []discovery.ForZone{{Name: "z1"}, {Name: "z2"}}, ForNodes: []discovery.ForNode{{Name: "node-1"}},
					},
				},
				{Addresses: []string{"10.0.0.2"}},
			},
			Ports: []discovery.EndpointPort{
				{Name: to("http"), Protocol: to(core.ProtocolTCP), Port: to(int32(8080)), AppProtocol: to("http")},
			},
		},
		{ObjectMeta: bare("empty"), AddressType: "IPv6", Ports: []discovery.EndpointPort{{}}},
	}
}

func nodes() []core.Node {
	return []core.Node{{
		ObjectMeta: metadata("node-1"),
		Spec: core.NodeSpec{
			PodCIDR: "10.0.0.0/24", PodCIDRs: []string{"10.0.0.0/24", "fd00:10::/64"}, ProviderID: "p://x", Unschedulable: true,
			Taints: []core.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Value: "v", Effect: "NoSchedule", TimeAdded: to(meta.Unix(9, 0))}},
		},
		Status: core.NodeStatus{
			Phase:      "Running",
			Conditions: []core.NodeCondition{{Type: "Ready", Status: "True"}},
			Addresses:  []core.NodeAddress{{Type: "InternalIP", Address: "192.168.0.2"}, {Type: "Hostname", Address: "node-1"}},
			NodeInfo:   core.NodeSystemInfo{KernelVersion: "6.18"},
			Images:     []core.ContainerImage{{Names: []string{"a"}, SizeBytes: 1}},
		},
	}}
}

func main() {
	directory := os.Args[1]
	write := func(name string, gv schema.GroupVersion, object runtime.Object) {
		for suffix, mediaType := range mediaTypes {
			save(filepath.Join(directory, name+suffix), encode(mediaType, gv, object))
		}
	}
	write("services", core.SchemeGroupVersion, &core.ServiceList{ListMeta: list, Items: services()})
	write("endpointslices", discovery.SchemeGroupVersion, &discovery.EndpointSliceList{ListMeta: list, Items: slices()})
	write("nodes", core.SchemeGroupVersion, &core.NodeList{ListMeta: list, Items: nodes()})
	cidrs := []string{"10.96.0.0/12", "fd00::/112"}
	write("servicecidrs", networking.SchemeGroupVersion, &networking.ServiceCIDRList{ListMeta: list, Items: []networking.ServiceCIDR{
		{ObjectMeta: metadata("kubernetes"), Spec: networking.ServiceCIDRSpec{CIDRs: cidrs}},
	}})

	expired := &meta.Status{
		Status: "Failure", Code: 410, Reason: "Expired", Message: "too old resource version: 1 (7)",
		Details: &meta.StatusDetails{RetryAfterSeconds: 5},
	}
	write("status", schema.GroupVersion{Version: "v1"}, expired)
	bookmark := &core.Service{ObjectMeta: meta.ObjectMeta{ResourceVersion: "4713"}}
	end := bookmark.DeepCopy()
	end.Annotations = map[string]string{"k8s.io/initial-events-end": "true"}
	for suffix, mediaType := range mediaTypes {
		info := info(mediaType)
		var stream bytes.Buffer
		frames := info.StreamSerializer.Framer.NewFrameWriter(&stream)
		encoder := scheme.Codecs.EncoderForVersion(info.StreamSerializer.Serializer, core.SchemeGroupVersion)
		for _, event := range []struct {
			kind   string
			object runtime.Object
		}{
			{"ADDED", &services()[0]}, {"BOOKMARK", end}, {"MODIFIED", &services()[1]},
			{"DELETED", &services()[0]}, {"BOOKMARK", bookmark}, {"ERROR", expired},
		} {
			raw := encode(mediaType, core.SchemeGroupVersion, event.object)
			check(encoder.Encode(&meta.WatchEvent{Type: event.kind, Object: runtime.RawExtension{Raw: raw}}, frames))
		}
		save(filepath.Join(directory, "watch"+suffix), stream.Bytes())
	}
}

var mediaTypes = map[string]string{".json": runtime.ContentTypeJSON, ".protobuf": runtime.ContentTypeProtobuf}

func info(mediaType string) runtime.SerializerInfo {
	info, found := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), mediaType)
	if !found {
		log.Fatalf("no serializer for %s", mediaType)
	}
	return info
}

func encode(mediaType string, gv schema.GroupVersion, object runtime.Object) []byte {
	encoded, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info(mediaType).Serializer, gv), object)
	check(err)
	return encoded
}

func save(path string, content []byte) {
	check(os.WriteFile(path, content, 0o644))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
