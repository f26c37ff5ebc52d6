package cloudprovider

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/singleflight"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// listing lists all claims of the Cluster, for many calls at once where they come together, as when a zone is lost. Each gets a list that was
// asked for after it called. The zero value is ready.
type listing struct {
	calls singleflight.Group
	turn  sync.Mutex
}

func (l *listing) claims(ctx context.Context, c *CloudProvider) ([]*agentv1alpha1.Claim, error) {
	const all = ""
	call := l.calls.DoChan(all, func() (any, error) {
		l.turn.Lock() // those that call meanwhile share this list
		defer l.turn.Unlock()
		l.calls.Forget(all) // those that call from now on do not
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.Timeout)
		defer cancel()
		response, err := c.Client.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: c.Cluster})
		if err != nil {
			return nil, fmt.Errorf("listing the claims: %w", err)
		}
		return response.GetClaims(), nil
	})
	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("listing the claims: %w", context.Cause(ctx))
	case result := <-call:
		claims, _ := result.Val.([]*agentv1alpha1.Claim)
		return claims, result.Err
	}
}
