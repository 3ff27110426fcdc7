// This file replaces kube-proxy's pkg/proxy/topology.go when its tests are built with
// `go test -overlay`. It asks the model of proxy-ctl, so that kube-proxy's table of endpoint sets
// is run against that model.

package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"

	v1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/features"
)

type question struct {
	Node          string            `json:"node"`
	Zone          string            `json:"zone"`
	InternalLocal bool              `json:"internal_local"`
	ExternalLocal bool              `json:"external_local"`
	External      bool              `json:"external"`
	Endpoints     []endpointInQuery `json:"endpoints"`
}

type endpointInQuery struct {
	Address     string   `json:"address"`
	Local       bool     `json:"local"`
	Ready       bool     `json:"ready"`
	Serving     bool     `json:"serving"`
	Terminating bool     `json:"terminating"`
	Zones       []string `json:"zones"`
	Nodes       []string `json:"nodes"`
}

type answer struct {
	Cluster []string `json:"cluster"`
	Local   []string `json:"local"`
	All     []string `json:"all"`
	Any     bool     `json:"any"`
}

// CategorizeEndpoints asks the program that the environment variable ENDPOINT_SETS names, by JSON
// on its standard input.
func CategorizeEndpoints(endpoints []Endpoint, svcInfo ServicePort, nodeName string, topologyLabels map[string]string) (clusterEndpoints, localEndpoints, allReachableEndpoints []Endpoint, hasAnyEndpoints bool) {
	query := question{
		Node:          nodeName,
		Zone:          topologyLabels[v1.LabelTopologyZone],
		InternalLocal: svcInfo.InternalPolicyLocal(),
		ExternalLocal: svcInfo.ExternalPolicyLocal(),
		External:      svcInfo.ExternallyAccessible(),
	}
	byAddress := make(map[string]Endpoint)
	for _, endpoint := range endpoints {
		asked := endpointInQuery{
			Address:     endpoint.String(),
			Local:       endpoint.IsLocal(),
			Ready:       endpoint.IsReady(),
			Serving:     endpoint.IsServing(),
			Terminating: endpoint.IsTerminating(),
			Zones:       endpoint.ZoneHints().UnsortedList(),
		}
		// Without this gate, API servers of Kubernetes 1.34 and older store no hints of nodes.
		if utilfeature.DefaultFeatureGate.Enabled(features.PreferSameTrafficDistribution) {
			asked.Nodes = endpoint.NodeHints().UnsortedList()
		}
		query.Endpoints = append(query.Endpoints, asked)
		byAddress[asked.Address] = endpoint
	}
	sets := ask(query)
	named := func(addresses []string) (found []Endpoint) {
		for _, address := range addresses {
			endpoint, known := byAddress[address]
			if !known {
				panic(fmt.Sprintf("%s is in the answer, and was not asked for", address))
			}
			found = append(found, endpoint)
		}
		return found
	}
	return named(sets.Cluster), named(sets.Local), named(sets.All), sets.Any
}

func ask(query question) (sets answer) {
	input, err := json.Marshal(query)
	if err != nil {
		panic(err)
	}
	program := exec.Command(os.Getenv("ENDPOINT_SETS"))
	program.Env = append(os.Environ(), "ENDPOINT_SETS_OF_STDIN=1")
	program.Stdin = bytes.NewReader(input)
	program.Stderr = os.Stderr
	output, err := program.Output()
	if err != nil {
		panic(fmt.Sprintf("%s for %s: %v", program.Path, input, err))
	}
	if err := json.Unmarshal(output, &sets); err != nil {
		panic(fmt.Sprintf("%s answers %q: %v", program.Path, output, err))
	}
	return sets
}
