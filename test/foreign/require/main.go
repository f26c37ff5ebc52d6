// Command require makes pkg/go.mod require the newest commit that changed proto/. Others who get
// the module pkg get that one.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/karpenter-capi/karpenter-capi/test/foreign"
)

func main() {
	version, err := require(context.Background(), foreign.Repository{Root: "."})
	if err != nil {
		fmt.Fprintln(os.Stderr, "require:", err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, "pkg requires", foreign.Proto, version)
}

func require(ctx context.Context, repository foreign.Repository) (string, error) {
	commit, err := repository.NewestChange(ctx, "proto")
	if err != nil {
		return "", err
	}
	version, err := repository.Version(ctx, "proto", commit)
	if err != nil {
		return "", err
	}
	return version, repository.Require("pkg", foreign.Proto, version)
}
