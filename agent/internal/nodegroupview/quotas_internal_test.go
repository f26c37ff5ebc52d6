package nodegroupview

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// reviews responds to access reviews.
type reviews struct {
	client.Writer

	err error
}

func (r reviews) Create(_ context.Context, object client.Object, _ ...client.CreateOption) error {
	if review, ok := object.(*authorizationv1.SelfSubjectAccessReview); ok {
		review.Status.Allowed = true
	}
	return r.err
}

// denied is a cache whose list requests are denied: it waits until they are allowed, or fails.
type denied struct {
	cache.Cache

	err error
}

func (d denied) GetInformer(ctx context.Context, _ client.Object, _ ...cache.InformerGetOption) (cache.Informer, error) {
	if d.err != nil {
		return nil, d.err
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestQuotasThatCannotBeReadDelayNothing(t *testing.T) {
	broken := errors.New("broken")
	for name, q := range map[string]*quotas{
		"reviews that fail":     newQuotas(reviews{err: broken}, denied{}, nil),
		"a list that is denied": newQuotas(reviews{}, denied{}, nil),
		"a cache that fails":    newQuotas(reviews{}, denied{err: broken}, nil),
	} {
		t.Run(name, func(t *testing.T) {
			q.decideWithin = 10 * time.Millisecond
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- q.Start(ctx) }()
			refusal, err := q.refusal(ctx, types.NamespacedName{Namespace: "fleet", Name: "group"})
			require.NoError(t, err)
			require.Nil(t, refusal)
			require.Empty(t, ended, "it keeps trying")
			cancel()
			require.NoError(t, <-ended)
		})
	}
}
