// Package providerid sets the provider ID of each NodeClaim to that of its machine, and keeps it
// so.
//
// Create sets a placeholder, so that core never waits. This controller replaces it with the real ID
// once the agent reports that. It does so during the NodeClaim's whole life, not once: core writes
// without a lock, and may write the placeholder back, when its cache lags or when it had not
// written it yet when the real ID arrived. Core believes that a NodeClaim with the placeholder has
// no Node.
package providerid

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/claimsource"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

const (
	name = "nodeclaim.providerid"
	// resync is well below the 2 minutes after which core's garbage collection checks provider IDs
	// again.
	resync = 30 * time.Second
	// soon is the interval for a NodeClaim whose launch core has not recorded yet, or whose machine
	// another NodeClaim is about to leave.
	soon        = time.Second
	concurrency = 100
)

// Config configures a [Controller]. All fields are REQUIRED.
type Config struct {
	// Kube reads from a cache with an index on status.providerID.
	Kube client.Client
	// Live reads from the API server.
	Live client.Reader
	// CloudProvider determines which NodeClaims belong to this provider.
	CloudProvider cloudprovider.CloudProvider
	// Claims is a mirror of the shim's claims.
	Claims claimsource.Claims
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Recorder records events.
	Recorder events.Recorder
}

// Controller sets the provider IDs of NodeClaims.
type Controller struct {
	Config
}

// New returns the controller.
func New(c Config) *Controller { return &Controller{Config: c} }

// Reconcile checks one NodeClaim.
func (c *Controller) Reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	if !nodeclaimutils.IsManaged(nodeClaim, c.CloudProvider) {
		return reconcile.Result{}, nil
	}
	providerID, ok := c.providerID(nodeClaim.UID)
	if !ok || nodeClaim.Status.ProviderID == providerID {
		return reconcile.Result{RequeueAfter: resync}, nil
	}

	// Decide from a live read, because the cache may be stale.
	current := &karpv1.NodeClaim{}
	if err := c.Live.Get(ctx, client.ObjectKeyFromObject(nodeClaim), current); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	switch {
	case current.UID != nodeClaim.UID:
		return reconcile.Result{}, nil
	case current.Status.ProviderID == providerID:
		return reconcile.Result{RequeueAfter: resync}, nil
	case !current.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue(), current.Status.ProviderID == "":
		// Core is about to write the placeholder, over any current value.
		return reconcile.Result{RequeueAfter: soon}, nil
	case current.Status.ProviderID != c.placeholder(current.UID):
		return c.refuse(ctx, current, fmt.Sprintf("The NodeClaim has provider ID %s, but its machine has %s.",
			current.Status.ProviderID, providerID)), nil
	}
	others, err := owners.Others(ctx, c.Kube, current, providerID)
	if err != nil {
		return reconcile.Result{}, err
	}
	if len(others) == 0 {
		return c.patch(ctx, current, providerID)
	}
	// Core's bookkeeping breaks if two NodeClaims share a provider ID.
	staying, stays := lo.Find(others, func(other *karpv1.NodeClaim) bool { return other.DeletionTimestamp.IsZero() })
	if !stays { // a hand-over: core has not ended the other NodeClaim yet
		return reconcile.Result{RequeueAfter: soon}, nil
	}
	return c.refuse(ctx, current, fmt.Sprintf("NodeClaim %s already has the provider ID %s of this NodeClaim's machine.",
		staying.Name, providerID)), nil
}

// providerID returns the provider ID of the machine of a claim that has not ended.
func (c *Controller) providerID(uid types.UID) (string, bool) {
	claim, ok := c.Claims.Get(string(uid))
	if !ok || claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return "", false
	}
	id := claim.GetMachine().GetProviderId()
	return id, id != ""
}

func (c *Controller) placeholder(uid types.UID) string {
	return placeholder.ProviderID(c.Cluster.GetNamespace(), c.Cluster.GetName(), string(uid))
}

// patch writes only the provider ID, and only if the NodeClaim has not changed since it was read.
func (c *Controller) patch(ctx context.Context, nodeClaim *karpv1.NodeClaim, providerID string) (reconcile.Result, error) {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": nodeClaim.ResourceVersion},
		"status":   map[string]any{"providerID": providerID},
	})
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("encoding the patch: %w", err)
	}
	registered := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).IsTrue()
	if err := c.Kube.Status().Patch(ctx, nodeClaim, client.RawPatch(types.MergePatchType, patch)); err != nil {
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: time.Millisecond}, nil
		}
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("patching the provider ID: %w", err))
	}
	patchesTotal.Inc(map[string]string{registeredLabel: strconv.FormatBool(registered)})
	log.FromContext(ctx).Info("set the NodeClaim's provider ID", "provider-id", providerID, "registered", registered)
	return reconcile.Result{RequeueAfter: resync}, nil
}

// refuse leaves the NodeClaim unchanged and reports why.
func (c *Controller) refuse(ctx context.Context, nodeClaim *karpv1.NodeClaim, message string) reconcile.Result {
	conflictsTotal.Inc(nil)
	log.FromContext(ctx).Error(nil, "cannot set the NodeClaim's provider ID", "reason", message)
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "ProviderIDConflict",
		Message:        message,
		DedupeValues:   []string{string(nodeClaim.UID)},
		DedupeTimeout:  10 * time.Minute,
	})
	return reconcile.Result{RequeueAfter: resync}
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(c.CloudProvider))).
		WatchesRawSource(claimsource.NodeClaims(c.Claims)).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(reconcile.AsReconciler(m.GetClient(), c))
}
