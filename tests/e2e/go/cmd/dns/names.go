package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
)

const zone = "cluster.local"

// names finds what names of the cluster are about.
type names struct {
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
}

// answer is what is known of a name, for every type of question.
type answer struct {
	exists    bool
	addresses []netip.Addr
	// For PTR.
	name string
	// For CNAME.
	alias string
	// For SRV.
	servers []server
}

type server struct {
	name string
	port uint16
}

func (n names) lookup(name string) answer {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if strings.HasSuffix(name, ".arpa") {
		return n.reverse(name)
	}
	rest, inZone := strings.CutSuffix(name, "."+zone)
	parts := strings.Split(rest, ".")
	if !inZone || len(parts) < 3 {
		return answer{}
	}
	own, namespace, kind := parts[len(parts)-3], parts[len(parts)-2], parts[len(parts)-1]
	switch kind {
	case "pod":
		return ofPod(own)
	case "svc":
		service, err := n.services.Services(namespace).Get(own)
		if err == nil {
			return n.ofService(service, parts[:len(parts)-3])
		}
	}
	return answer{}
}

// ofPod finds the address in names such as 10-244-1-2.namespace.pod.cluster.local.
func ofPod(dashed string) answer {
	four, six := strings.ReplaceAll(dashed, "-", "."), strings.ReplaceAll(dashed, "-", ":")
	addresses := parsed(four, six)
	return answer{exists: len(addresses) > 0, addresses: addresses}
}

// ofService finds names of a Service, and those below it, whose further parts come first.
func (n names) ofService(service *core.Service, below []string) answer {
	headless := service.Spec.ClusterIP == core.ClusterIPNone
	switch {
	case service.Spec.Type == core.ServiceTypeExternalName:
		if len(below) > 0 {
			return answer{}
		}
		return answer{exists: true, alias: strings.TrimSuffix(service.Spec.ExternalName, ".") + "."}
	case len(below) == 0 && !headless:
		return answer{exists: true, addresses: parsed(service.Spec.ClusterIPs...)}
	case len(below) == 0:
		found := answer{exists: true}
		for _, endpoint := range n.endpoints(service) {
			found.addresses = append(found.addresses, parsed(endpoint.address)...)
		}
		return found
	case len(below) == 1 && headless:
		return n.ofEndpoint(service, below[0])
	case len(below) == 2 && strings.HasPrefix(below[0], "_") && strings.HasPrefix(below[1], "_"):
		return n.ofPort(service, below[0][1:], below[1][1:])
	}
	return answer{}
}

func (n names) ofEndpoint(service *core.Service, host string) (found answer) {
	for _, endpoint := range n.endpoints(service) {
		if endpoint.host == host {
			found.exists = true
			found.addresses = append(found.addresses, parsed(endpoint.address)...)
		}
	}
	return found
}

// ofPort finds names such as _http._tcp.service.namespace.svc.cluster.local.
func (n names) ofPort(service *core.Service, port, protocol string) (found answer) {
	add := func(name string, number int32) {
		found.exists = true
		found.servers = append(found.servers, server{name, uint16(number)})
	}
	if service.Spec.ClusterIP != core.ClusterIPNone {
		for _, own := range service.Spec.Ports {
			if own.Name == port && strings.EqualFold(string(own.Protocol), protocol) {
				add(nameOf(service), own.Port)
			}
		}
		return found
	}
	for _, endpoint := range n.endpoints(service) {
		for _, own := range endpoint.ports {
			if own.Name != nil && *own.Name == port && own.Port != nil && strings.EqualFold(string(*own.Protocol), protocol) {
				add(endpoint.host+"."+nameOf(service), *own.Port)
			}
		}
	}
	return found
}

// reverse finds the Service or the endpoint of a headless Service whose address it is.
func (n names) reverse(name string) answer {
	wanted, err := addressIn(name)
	if err != nil {
		return answer{}
	}
	services, err := n.services.List(labels.Everything())
	if err != nil {
		return answer{}
	}
	for _, service := range services {
		if slices.Contains(parsed(service.Spec.ClusterIPs...), wanted) {
			return answer{exists: true, name: nameOf(service)}
		}
		if service.Spec.ClusterIP != core.ClusterIPNone {
			continue
		}
		for _, endpoint := range n.endpoints(service) {
			if slices.Contains(parsed(endpoint.address), wanted) {
				return answer{exists: true, name: endpoint.host + "." + nameOf(service)}
			}
		}
	}
	return answer{}
}

// addressIn reads 1.2.0.192.in-addr.arpa, or its like for IPv6.
func addressIn(name string) (netip.Addr, error) {
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		parts := strings.Split(rest, ".")
		slices.Reverse(parts)
		return netip.ParseAddr(strings.Join(parts, "."))
	}
	digits := strings.Split(strings.TrimSuffix(name, ".ip6.arpa"), ".")
	slices.Reverse(digits)
	var groups []string
	for group := range slices.Chunk(digits, 4) {
		groups = append(groups, strings.Join(group, ""))
	}
	return netip.ParseAddr(strings.Join(groups, ":"))
}

// endpoint is one address of a Service that is to be named.
type endpoint struct {
	address string
	// The first part of its name.
	host  string
	ports []discovery.EndpointPort
}

func (n names) endpoints(service *core.Service) (found []endpoint) {
	selector := labels.SelectorFromSet(labels.Set{discovery.LabelServiceName: service.Name})
	list, err := n.slices.EndpointSlices(service.Namespace).List(selector)
	if err != nil {
		return nil
	}
	for _, slice := range list {
		for _, own := range slice.Endpoints {
			ready := own.Conditions.Ready == nil || *own.Conditions.Ready
			if !ready && !service.Spec.PublishNotReadyAddresses {
				continue
			}
			for _, address := range own.Addresses {
				found = append(found, endpoint{address, hostOf(own, address), slice.Ports})
			}
		}
	}
	return found
}

func hostOf(endpoint discovery.Endpoint, address string) string {
	if endpoint.Hostname != nil && *endpoint.Hostname != "" {
		return *endpoint.Hostname
	}
	return strings.NewReplacer(".", "-", ":", "-").Replace(address)
}

func nameOf(service *core.Service) string {
	return fmt.Sprintf("%s.%s.svc.%s.", service.Name, service.Namespace, zone)
}

// parsed leaves out what is no address.
func parsed(texts ...string) (addresses []netip.Addr) {
	for _, text := range texts {
		if address, err := netip.ParseAddr(text); err == nil {
			addresses = append(addresses, address)
		}
	}
	return addresses
}
