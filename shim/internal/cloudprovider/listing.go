package cloudprovider

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/singleflight"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// listing lists all claims of the Cluster and shares each list among concurrent calls, such as when
// a zone is lost. Every call gets a list that was requested after the call began. The zero value is
// ready to use.
type listing struct {
	calls singleflight.Group
	turn  sync.Mutex
}

func (l *listing) claims(ctx context.Context, c *CloudProvider) ([]*agentv1alpha1.Claim, error) {
	const all = ""
	call := l.calls.DoChan(all, func() (any, error) {
		l.turn.Lock() // calls that arrive while this one waits share its list
		defer l.turn.Unlock()
		l.calls.Forget(all) // later calls do not
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
