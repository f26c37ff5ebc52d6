package control_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/control"
)

// infrastructure implements the operations. This one has the operation LoseMachine only.
type infrastructure struct{ control.Control }

func (infrastructure) LoseMachine(_ context.Context, cluster control.Cluster, machine string) error {
	fmt.Println("deleting", cluster.Namespace+"/"+machine)
	return nil
}

// What an agent serves beside its API, and how the suite calls it.
func ExampleHandler() {
	server := httptest.NewServer(control.Handler(infrastructure{}))
	defer server.Close()

	body := strings.NewReader(`{"cluster": {"namespace": "fleet", "name": "spoke"}, "machine": "small-x7k2p"}`)
	response, err := http.Post(server.URL+"/v1/"+control.LoseMachine, "application/json", body)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer response.Body.Close() //nolint:errcheck // Nothing is left to lose.
	content, err := io.ReadAll(response.Body)
	fmt.Println(response.StatusCode, strings.TrimSpace(string(content)), err)
	// Output:
	// deleting fleet/small-x7k2p
	// 200 {} <nil>
}
