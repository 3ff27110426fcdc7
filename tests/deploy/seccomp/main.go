// Prints what a container runtime's own seccomp profile is for a container: of the OCI configuration in a file, what
// belongs into its linux.seccomp.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	containerd "github.com/containerd/containerd/v2/contrib/seccomp"
	moby "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func profile(runtime string, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	switch runtime {
	case "containerd":
		return containerd.DefaultProfile(spec), nil
	case "moby":
		return moby.GetDefaultProfile(spec)
	default:
		return nil, fmt.Errorf("%q is none of containerd, moby", runtime)
	}
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) != 2 {
		return fmt.Errorf("usage: seccomp containerd|moby CONFIG")
	}
	text, err := os.ReadFile(arguments[1])
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("reading %s: %w", arguments[1], err)
	}
	found, err := profile(arguments[0], &spec)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}
