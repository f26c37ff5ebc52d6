// Package protocol is BigFleet's protocol for capacity providers on the wire, under names of its own.
package protocol

import (
	"context"
	"strings"

	"google.golang.org/grpc"
)

// Service is the name by which BigFleet calls [ProviderServer].
const Service = "bigfleet.v1alpha1.CapacityProvider"

// Register serves the provider under the name that BigFleet calls.
func Register(registrar grpc.ServiceRegistrar, provider ProviderServer) {
	described := Provider_ServiceDesc
	described.ServiceName = Service
	registrar.RegisterService(&described, provider)
}

// NewClient returns a client that calls a provider as BigFleet does.
func NewClient(conn grpc.ClientConnInterface) ProviderClient {
	return NewProviderClient(renamed{ClientConnInterface: conn})
}

// renamed calls methods of [Service].
type renamed struct{ grpc.ClientConnInterface }

func (r renamed) Invoke(ctx context.Context, method string, request, response any, options ...grpc.CallOption) error {
	return r.ClientConnInterface.Invoke(ctx, "/"+Service+method[strings.LastIndex(method, "/"):], request, response, options...)
}
