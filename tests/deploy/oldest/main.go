// Reads the Kubernetes objects of a file, a JSON array, as the oldest version does that the chart is for: a field that it
// does not know is an error.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

func main() {
	if err := read(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func read(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var objects []json.RawMessage
	if err := json.Unmarshal(text, &objects); err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	scheme := runtime.NewScheme()
	kinds := runtime.NewSchemeBuilder(apps.AddToScheme, batch.AddToScheme, core.AddToScheme, rbac.AddToScheme)
	if err := kinds.AddToScheme(scheme); err != nil {
		return err
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for _, object := range objects {
		if _, kind, err := decoder.Decode(object, nil, nil); err != nil {
			return fmt.Errorf("%v: %w", kind, err)
		}
	}
	return nil
}
