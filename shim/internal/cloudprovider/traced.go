package cloudprovider

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"sigs.k8s.io/controller-runtime/pkg/log"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
)

// trace starts a trace of the method for a NodeClaim. The returned function ends it; a nil error
// means success. Without a TracerProvider both do nothing.
func (c *CloudProvider) trace(ctx context.Context, method string, nodeClaim *karpv1.NodeClaim) (context.Context, func(error)) {
	if c.TracerProvider == nil {
		return ctx, func(error) {}
	}
	ctx, span := c.TracerProvider.Tracer("cloudprovider").Start(ctx, "CloudProvider."+method, trace.WithAttributes(
		attribute.String("karpenter.nodeclaim", nodeClaim.Name),
		attribute.String("karpenter.nodeclaim_uid", string(nodeClaim.UID)),
		attribute.String("karpenter.nodepool", nodeClaim.Labels[karpv1.NodePoolLabelKey]),
	))
	if id := tracing.ID(ctx); id != "" {
		ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("traceID", id))
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
