package nodegroupview

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
	// askAgain is how soon the agent's rights are checked again after the API server gave no
	// result.
	askAgain = time.Second
	// grantedLater is how soon the rights are checked again after some were missing.
	grantedLater = time.Minute
	// decideWithin is how long node groups wait until it is known whether the quotas can be read.
	decideWithin = 10 * time.Second
)

// quotas follows the ResourceQuotas if the agent has the right to read them, which is checked
// first. Otherwise it knows of none: a rejected watch would keep the agent from starting, only for
// the sake of a reason that users can also find elsewhere.
type quotas struct {
	writer     client.Writer
	cache      cache.Cache
	namespaces []string // empty means all

	changes chan event.TypedGenericEvent[types.NamespacedName]
	// decided is closed once it is known whether the quotas can be read, or decideWithin has
	// passed. readable is closed once the quotas are read, which may be later.
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

// Start follows the quotas until ctx is done. It begins as soon as the agent has the rights and the
// API server allows it. Obstacles are not errors. After decideWithin, callers stop waiting for the
// quotas.
func (q *quotas) Start(ctx context.Context) error {
	decide := sync.OnceFunc(func() { close(q.decided) })
	timer := time.AfterFunc(q.decideWithin, func() {
		select {
		case <-q.decided:
		default:
			log.FromContext(ctx).Info("ResourceQuotas are ignored until the API server lets the agent read them")
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
			if err = q.watch(ctx); err == nil {
				close(q.readable)
				decide()
				<-ctx.Done()
				return nil
			}
		case err == nil:
			if !told {
				log.FromContext(ctx).Info("ResourceQuotas are ignored: the agent lacks rights on resourcequotas", "missing", missing)
				told = true
			}
			decide()
			wait = grantedLater
		}
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "looking for ResourceQuotas; it will be retried")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// missing returns the rights that the agent lacks, or "" if it has them all.
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

// watch starts the informer of the quotas, and returns once they are in the cache.
func (q *quotas) watch(ctx context.Context) error {
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

// exhausted reports why a quota leaves no room for Machines, or "" if it does.
func exhausted(object any) string {
	if quota, ok := object.(*corev1.ResourceQuota); ok {
		if refusal := eligibility.Quota([]corev1.ResourceQuota{*quota}, ""); refusal != nil {
			return refusal.Message
		}
	}
	return ""
}

// refusal reports why the namespace admits no further Machine. It is nil if the namespace does, or
// if the quotas cannot be read. It waits until that is decided.
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
