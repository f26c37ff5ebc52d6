package server

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// isTraced holds the traced methods: the unary ones of the API. A stream would be a single span for
// hours, and health checks are too frequent. Method names that a caller invents create no span.
var isTraced = unaryMethods(agentv1alpha1.NodeGroupService_ServiceDesc, agentv1alpha1.ClaimService_ServiceDesc,
	agentv1alpha1.MachineService_ServiceDesc, agentv1alpha1.StatusService_ServiceDesc, agentv1alpha1.CertificateService_ServiceDesc,
	agentv1alpha1.ClusterService_ServiceDesc, agentv1alpha1.NodePoolService_ServiceDesc)

func unaryMethods(services ...grpc.ServiceDesc) map[string]bool {
	methods := map[string]bool{}
	for _, service := range services {
		for _, method := range service.Methods {
			methods["/"+service.ServiceName+"/"+method.MethodName] = true
		}
	}
	return methods
}

func traces(method string) bool { return isTraced[method] }

// mayTrace reports whether another call of this caller may be recorded. Calls that a caller marks
// as sampled must not overload the agent or its collector, or displace the traces of others.
// It runs before any interceptor, so a panic would end the process.
func (s *Server) mayTrace(ctx context.Context) (may bool) {
	_ = panics.Confined(s.config.Log, panics.Calls, "a call is not traced because of a bug in the agent", func() error {
		may = s.limits.Trace(s.callerOn(handshakeOf(ctx)).limitedAs)
		return nil
	})
	return may
}

// annotate adds an attribute to the call's span, if it has one.
func annotate(ctx context.Context, key, value string) {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.SetAttributes(attribute.String("capi_agent."+key, value))
	}
}
