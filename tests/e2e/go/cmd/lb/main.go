// lb stands in for a cloud's load balancers: it gives each Service of type LoadBalancer an address of each of its
// families, and routes that address, in this network namespace, to nodes. With externalTrafficPolicy Local these are
// the nodes whose health check port says that they have endpoints, otherwise all. Connections are spread over these
// nodes. With session affinity, all go to the first of them, because one client is all that the tests have.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	finalizer    = "service.kubernetes.io/load-balancer-cleanup"
	betweenLooks = 300 * time.Millisecond
	// The source of connections to load balancers, which is no address of the nodes' network.
	outside = "203.0.113.1"
	// The most addresses of a family.
	most = 249
)

// balancer knows which addresses are in use, and where they are routed.
type balancer struct {
	client *kubernetes.Clientset
	probe  http.Client
	// Namespace and name of the Service of each address.
	owners map[string]string
	// Nodes that each address is routed to.
	routes map[string][]string
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "who it is for the API server")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	config.QPS, config.Burst = 100, 100
	b := balancer{
		client: kubernetes.NewForConfigOrDie(config),
		probe:  http.Client{Timeout: 500 * time.Millisecond},
		owners: map[string]string{},
		routes: map[string][]string{},
	}
	for ; ; time.Sleep(betweenLooks) {
		if err := b.reconcile(context.Background()); err != nil {
			log.Print(err)
		}
	}
}

// reconcile does what is to be done for all Services.
func (b *balancer) reconcile(ctx context.Context) error {
	cached := meta.ListOptions{ResourceVersion: "0"}
	services, err := b.client.CoreV1().Services("").List(ctx, cached)
	if err != nil {
		return err
	}
	nodes, err := b.client.CoreV1().Nodes().List(ctx, cached)
	if err != nil {
		return err
	}
	served := map[string]bool{}
	for i := range services.Items {
		service := &services.Items[i]
		if !isServed(service) {
			err = b.withdraw(ctx, service)
		} else {
			served[key(service)] = true
			err = b.serve(ctx, service, nodes.Items)
		}
		if err != nil {
			// The next look finds the Service as it is then.
			log.Print(key(service), ": ", err)
		}
	}
	for _, owner := range b.owners {
		if !served[owner] {
			b.release(owner)
		}
	}
	return nil
}

func key(service *core.Service) string {
	return service.Namespace + "/" + service.Name
}

func isServed(service *core.Service) bool {
	return service.Spec.Type == core.ServiceTypeLoadBalancer && service.Spec.LoadBalancerClass == nil &&
		service.DeletionTimestamp == nil
}

// withdraw takes the addresses of a Service back, and the finalizer that kept it until now.
func (b *balancer) withdraw(ctx context.Context, service *core.Service) error {
	b.release(key(service))
	if !slices.Contains(service.Finalizers, finalizer) {
		return nil
	}
	service.Finalizers = slices.DeleteFunc(service.Finalizers, func(name string) bool { return name == finalizer })
	api := b.client.CoreV1().Services(service.Namespace)
	updated, err := api.Update(ctx, service, meta.UpdateOptions{})
	if err != nil || updated.DeletionTimestamp != nil || len(updated.Status.LoadBalancer.Ingress) == 0 {
		return err
	}
	updated.Status.LoadBalancer = core.LoadBalancerStatus{}
	_, err = api.UpdateStatus(ctx, updated, meta.UpdateOptions{})
	return err
}

// serve gives a Service its addresses, and routes them.
func (b *balancer) serve(ctx context.Context, service *core.Service, nodes []core.Node) error {
	api := b.client.CoreV1().Services(service.Namespace)
	if !slices.Contains(service.Finalizers, finalizer) {
		service.Finalizers = append(service.Finalizers, finalizer)
		updated, err := api.Update(ctx, service, meta.UpdateOptions{})
		if err != nil {
			return err
		}
		service = updated
	}
	var wanted []core.LoadBalancerIngress
	mode := core.LoadBalancerIPModeVIP
	for _, family := range service.Spec.IPFamilies {
		address, err := b.address(service, family)
		if err != nil {
			return err
		}
		if err := b.route(address, b.targets(service, family, nodes)); err != nil {
			return err
		}
		wanted = append(wanted, core.LoadBalancerIngress{IP: address, IPMode: &mode})
	}
	told := service.Status.LoadBalancer.Ingress
	if slices.EqualFunc(told, wanted, func(a, b core.LoadBalancerIngress) bool { return a.IP == b.IP }) {
		return nil
	}
	service.Status.LoadBalancer.Ingress = wanted
	_, err := api.UpdateStatus(ctx, service, meta.UpdateOptions{})
	return err
}

// address returns the address that a Service has, the one that it asks for, or the first that is free.
func (b *balancer) address(service *core.Service, family core.IPFamily) (string, error) {
	owner := key(service)
	for address, other := range b.owners {
		if other == owner && isOf(family, address) {
			return address, nil
		}
	}
	candidates := []string{}
	if wanted := service.Spec.LoadBalancerIP; wanted != "" && isOf(family, wanted) {
		candidates = append(candidates, wanted)
	}
	for i := 1; i <= most; i++ {
		if family == core.IPv6Protocol {
			candidates = append(candidates, fmt.Sprintf("fd00:172:31::%x", i))
		} else {
			candidates = append(candidates, fmt.Sprintf("172.31.0.%d", i))
		}
	}
	for _, address := range candidates {
		if _, taken := b.owners[address]; !taken {
			b.owners[address] = owner
			return address, nil
		}
	}
	return "", fmt.Errorf("all %d addresses of family %s are taken", most, family)
}

// targets returns the addresses of the nodes that get the traffic of a Service.
func (b *balancer) targets(service *core.Service, family core.IPFamily, nodes []core.Node) (targets []string) {
	local := service.Spec.ExternalTrafficPolicy == core.ServiceExternalTrafficPolicyLocal
	for _, node := range nodes {
		for _, address := range node.Status.Addresses {
			if address.Type != core.NodeInternalIP || !isOf(family, address.Address) {
				continue
			}
			if !local || b.isHealthy(address.Address, service.Spec.HealthCheckNodePort) {
				targets = append(targets, address.Address)
			}
		}
	}
	slices.Sort(targets)
	if service.Spec.SessionAffinity == core.ServiceAffinityClientIP && len(targets) > 1 {
		targets = targets[:1]
	}
	return targets
}

func (b *balancer) isHealthy(node string, port int32) bool {
	response, err := b.probe.Get("http://" + net.JoinHostPort(node, fmt.Sprint(port)) + "/")
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// route leads an address to nodes, or nowhere if there are none.
func (b *balancer) route(address string, nodes []string) error {
	if slices.Equal(b.routes[address], nodes) {
		return nil
	}
	ip := net.ParseIP(address)
	route := &netlink.Route{}
	if four := ip.To4(); four != nil {
		route.Dst = &net.IPNet{IP: four, Mask: net.CIDRMask(32, 32)}
	} else {
		route.Dst = &net.IPNet{IP: ip, Mask: net.CIDRMask(128, 128)}
	}
	// Next hops of IPv6 are added to those that are there, and do not replace them.
	if len(b.routes[address]) > 0 && (len(nodes) == 0 || ip.To4() == nil) {
		if err := netlink.RouteDel(&netlink.Route{Dst: route.Dst}); err != nil {
			return fmt.Errorf("removing the route of %s: %w", address, err)
		}
		delete(b.routes, address)
	}
	if len(nodes) > 0 {
		if ip.To4() != nil {
			route.Src = net.ParseIP(outside)
		}
		for _, node := range nodes {
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: net.ParseIP(node)})
		}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("routing %s to %v: %w", address, nodes, err)
		}
		b.routes[address] = nodes
	}
	log.Print("route ", address, " -> ", nodes)
	return nil
}

// release takes all addresses of a Service back.
func (b *balancer) release(owner string) {
	for address, other := range b.owners {
		if other != owner {
			continue
		}
		if err := b.route(address, nil); err != nil {
			log.Print(err)
		}
		delete(b.owners, address)
	}
}

func isOf(family core.IPFamily, address string) bool {
	return strings.Contains(address, ":") == (family == core.IPv6Protocol)
}
