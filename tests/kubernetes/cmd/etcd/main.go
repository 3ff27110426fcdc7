// etcd as the API server of the same module expects it: a distribution's may be too old to stream lists from.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
