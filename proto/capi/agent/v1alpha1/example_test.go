package agentv1alpha1_test

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// agent has one claim.
type agent struct {
	agentv1alpha1.UnimplementedClaimServiceServer
}

func (agent) GetClaim(_ context.Context, r *agentv1alpha1.GetClaimRequest) (*agentv1alpha1.GetClaimResponse, error) {
	return &agentv1alpha1.GetClaimResponse{Claim: &agentv1alpha1.Claim{
		Cluster: r.GetCluster(), ClaimId: r.GetClaimId(), Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
	}}, nil
}

// A call with nothing but gRPC. Package client of module pkg adds TLS that is reloaded, deadlines,
// retries and typed errors.
func ExampleNewClaimServiceClient() {
	listener := bufconn.Listen(1 << 16) // Stands for the network.
	server := grpc.NewServer()
	agentv1alpha1.RegisterClaimServiceServer(server, agent{})
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	connection, err := grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer connection.Close() //nolint:errcheck // Nothing is left to lose.

	response, err := agentv1alpha1.NewClaimServiceClient(connection).GetClaim(context.Background(), &agentv1alpha1.GetClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}, ClaimId: "7c9e",
	})
	fmt.Println(response.GetClaim().GetClaimId(), response.GetClaim().GetPhase(), err)
	// Output: 7c9e CLAIM_PHASE_BOUND <nil>
}
