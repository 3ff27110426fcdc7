// Prints the feature gates that the real kube-proxy takes, a line each: name, stage ("locked" where it cannot be
// changed), and on or off by default.
package main

import (
	"fmt"
	"slices"
	"strings"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	"k8s.io/kubernetes/cmd/kube-proxy/app"
)

// The stage that decides which group a gate belongs to.
var stages = map[string]string{"ALPHA": "alpha", "BETA": "beta", "": "other", "DEPRECATED": "other"}

func main() {
	app.NewProxyCommand()
	var lines []string
	for name, spec := range utilfeature.DefaultMutableFeatureGate.GetAll() {
		lines = append(lines, line(name, spec))
	}
	slices.Sort(lines)
	fmt.Println(strings.Join(lines, "\n"))
}

func line(name featuregate.Feature, spec featuregate.FeatureSpec) string {
	stage, value := stages[string(spec.PreRelease)], "off"
	if spec.LockToDefault {
		stage = "locked"
	}
	if spec.Default {
		value = "on"
	}
	return fmt.Sprintf("%s %s %s", name, stage, value)
}
