package tracing_test

import (
	"context"
	"fmt"
	"os"

	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
)

// A process without a configuration for tracing: nothing is exported, and no call needs a
// condition.
func ExampleFromEnvironment() {
	for _, name := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} {
		_ = os.Unsetenv(name)
	}
	traces, err := tracing.FromEnvironment(context.Background(), tracing.Config{Service: "my-autoscaler"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer traces.Shutdown()
	fmt.Println("provider:", traces.Provider())
	// Output: provider: <nil>
}
