package catalogue

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

const (
	// askAgain is how soon the agent's rights are asked for again when the API server did not say.
	askAgain = time.Second
	// grantedLater is how soon they are asked for again when they were missing.
	grantedLater = time.Minute
	// decideWithin is how long node groups wait for the quotas to be readable or known not to be.
	decideWithin = 10 * time.Second
)

// quotas follows the ResourceQuotas where the agent may read them. Where it may not, which is asked first, it knows none: a watch
// that is refused would keep the agent from starting, for the sake of a reason that people can see elsewhere too.
type quotas struct {
	writer     client.Writer
	cache      cache.Cache
	namespaces []string // empty for all

	changes chan event.TypedGenericEvent[types.NamespacedName]
	// decided is closed once it is known whether the quotas can be read, readable once they are; that may be later.
	decided, readable chan struct{}
	decideWithin      time.Duration
}

func newQuotas(writer client.Writer, from cache.Cache, namespaces []string) *quotas {
	return &quotas{
		writer: writer, cache: from, namespaces: namespaces,
		changes: make(chan event.TypedGenericEvent[types.NamespacedName], 1024),
		decided: make(chan struct{}), readable: make(chan struct{}), decideWithin: decideWithin,
	}
}

// Start follows the quotas, as soon as the agent has the rights and the API server lets it, until ctx is done. Nothing that keeps
// it from that is an error, and after a while nobody waits for it.
func (q *quotas) Start(ctx context.Context) error {
	decide := sync.OnceFunc(func() { close(q.decided) })
	timer := time.AfterFunc(q.decideWithin, func() {
		select {
		case <-q.decided:
		default:
			log.FromContext(ctx).Info("ResourceQuotas are not looked at until the API server lets the agent read them")
			decide()
		}
	})
	defer timer.Stop()
	told := false
	for {
		missing, err := q.missing(ctx)
		wait := askAgain
		switch {
		case err == nil && missing == "":
			if err = q.follow(ctx); err == nil {
				close(q.readable)
				decide()
				<-ctx.Done()
				return nil
			}
		case err == nil:
			if !told {
				log.FromContext(ctx).Info("ResourceQuotas are not looked at: the agent lacks rights on resourcequotas", "missing", missing)
				told = true
			}
			decide()
			wait = grantedLater
		}
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "looking for ResourceQuotas, which is tried again")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// missing names the rights that the agent lacks, "" when it has them all.
func (q *quotas) missing(ctx context.Context) (string, error) {
	namespaces := q.namespaces
	if len(namespaces) == 0 {
		namespaces = []string{""}
	}
	var missing []string
	for _, namespace := range namespaces {
		for _, verb := range []string{"list", "watch"} {
			review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Verb: verb, Resource: "resourcequotas"},
			}}
			err := q.writer.Create(ctx, review)
			if apierrors.IsForbidden(err) {
				return "create selfsubjectaccessreviews", nil
			}
			if err != nil {
				return "", fmt.Errorf("creating a SelfSubjectAccessReview: %w", err)
			}
			if !review.Status.Allowed {
				missing = append(missing, strings.TrimSpace(verb+" "+namespace))
			}
		}
	}
	return strings.Join(missing, ", "), nil
}

// follow returns once the quotas are in the cache.
func (q *quotas) follow(ctx context.Context) error {
	informer, err := q.cache.GetInformer(ctx, &corev1.ResourceQuota{})
	if err != nil {
		return fmt.Errorf("watching ResourceQuotas: %w", err)
	}
	changed := func(before, after string, object any) {
		quota, ok := object.(*corev1.ResourceQuota)
		if !ok || before == after {
			return
		}
		select {
		case q.changes <- event.TypedGenericEvent[types.NamespacedName]{Object: client.ObjectKeyFromObject(quota)}:
		case <-ctx.Done():
		}
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { changed("", exhausted(object), object) },
		UpdateFunc: func(before, after any) { changed(exhausted(before), exhausted(after), after) },
		DeleteFunc: func(object any) {
			if gone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
				object = gone.Obj
			}
			changed(exhausted(object), "", object)
		},
	})
	if err != nil {
		return fmt.Errorf("watching ResourceQuotas: %w", err)
	}
	return nil
}

// exhausted says why a quota leaves no room for Machines, "" when it does.
func exhausted(object any) string {
	if quota, ok := object.(*corev1.ResourceQuota); ok {
		if refusal := eligibility.Quota([]corev1.ResourceQuota{*quota}, ""); refusal != nil {
			return refusal.Message
		}
	}
	return ""
}

// refusal says why the namespace takes no further Machine, or nil when it does or nobody knows. It waits until that is decided.
func (q *quotas) refusal(ctx context.Context, group types.NamespacedName) (*eligibility.Refusal, error) {
	if q == nil {
		return nil, nil
	}
	select {
	case <-q.decided:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case <-q.readable:
	default:
		return nil, nil
	}
	var list corev1.ResourceQuotaList
	if err := q.cache.List(ctx, &list, client.InNamespace(group.Namespace)); err != nil {
		return nil, fmt.Errorf("listing ResourceQuotas: %w", err)
	}
	return eligibility.Quota(list.Items, group.Name), nil
}
