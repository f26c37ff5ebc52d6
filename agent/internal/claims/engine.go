// Package claims is the claim engine: it gives each claim exactly one Machine and takes back
// exactly that Machine, by compare-and-swap on Kubernetes objects alone.
//
// # State
//
// This process holds no state that matters. The MachineClaim anchors a claim: its creation decides
// which node group the claim belongs to, and its phase decides the race between binding and
// releasing. The [protocol.Ledger], an annotation of the MachineDeployment, records what is in
// flight there and changes only together with spec.replicas. The label on a Machine is the lasting
// binding.
//
// # One step
//
// A node group is processed one step at a time: read the MachineDeployment, then its claims,
// Machines and MachineSets; ask [protocol.Decide] what to do; write the ledger, or do the writes on
// other objects that the ledger permits. This repeats until there is nothing to do. Every event,
// every call and every restart leads to the same step, so there is no separate recovery. Steps of
// one node group do not overlap within a process. Between processes, the ledger's compare-and-swap
// orders them.
//
// # Group commit
//
// A call that adds a claim waits for the step that enters it. While a step is in progress, further
// calls gather, and the next step enters all of them in one write.
package claims

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/batchread"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Indexes are the names of the caches' indexes. An empty name means that there is no such index,
// and cached lists select by label instead.
type Indexes struct {
	// Group indexes Machines, MachineSets and MachineClaims that have not ended by the name of
	// their MachineDeployment.
	Group string
	// Failed indexes MachineClaims that failed, in the same way.
	Failed string
	// Cluster indexes Machines and MachineClaims by the name of their Cluster.
	Cluster string
}

// selecting returns a list option that uses an index of the caches if there is one, else a label.
func selecting(index, label, value string) client.ListOption {
	if index != "" {
		return client.MatchingFields{index: value}
	}
	return client.MatchingLabels{label: value}
}

// Config is the configuration of an [Engine].
type Config struct {
	// Name identifies this agent across restarts. Other agents of the hub have other names. Empty
	// means a random id for this process.
	Name string
	// Client reads from caches and writes. REQUIRED.
	Client client.Client
	// Reader reads from the API server itself, consistently. REQUIRED.
	Reader client.Reader
	// Indexes are the indexes of the caches behind Client.
	Indexes Indexes
	// NotEnded excludes ended claims from lists that Reader answers. Nil includes them, which is
	// only slower.
	NotEnded client.ListOption
	// Recorder records events for users. Nil means none.
	Recorder events.EventRecorder
	// ReportsNodes reports whether a holder reports the Cluster's Nodes with its live sets. Nil
	// means that none does.
	ReportsNodes func(holder string) bool
	// SpokeOf returns the id of the cluster whose shim last synchronized the claims of a Cluster,
	// "" if none is known. Sets and new claims of other clusters are refused, unless they have
	// claims of the Cluster. It applies to holders that report Nodes. SpokeOf must not block, and
	// may lag behind what other agents have recorded. ReadSpokeOf does not lag: it asks the hub.
	// Nil, which must be both, means that none is known.
	SpokeOf     func(cluster types.NamespacedName) string
	ReadSpokeOf func(ctx context.Context, cluster types.NamespacedName) (string, error)
	// Clock is the source of time. Nil means the real clock.
	Clock clock.Clock
	// SpareGrace is how long an unclaimed Machine is kept for the next claim. Zero means one
	// minute.
	SpareGrace time.Duration
	// TombstoneRetention is how long an ended claim is kept. It must be longer than any caller
	// retries. Zero means 24 hours.
	TombstoneRetention time.Duration
	// CollectGrace is the minimum age that a claim must have, relative to the token, before
	// [Engine.Sync] may collect it. Zero means 30 seconds.
	CollectGrace time.Duration
	// TokenLife is how long after its listing a token may be used. A holder is expected to read its
	// live set right after it took the token. Zero means ten minutes.
	TokenLife time.Duration
	// NoMachines returns why no Machine can be created for a MachineDeployment now, because of the
	// hub's ResourceQuotas or of Cluster API itself. A nil refusal means that nothing is known to
	// prevent it. A nil function means the same for every group. A group with a spare Machine
	// accepts a claim in any case.
	NoMachines func(ctx context.Context, md *clusterv1.MachineDeployment) (*eligibility.Refusal, error)
	// Failure defines when a Machine is given up. The zero value gives none up.
	Failure protocol.FailurePolicy
	// Report returns a condition of a Machine's infrastructure object, where
	// [protocol.FailurePolicy.See] names one, without waiting for a read. known is false until the
	// object has been read. Nil means that nothing is known.
	Report func(ctx context.Context, m *clusterv1.Machine, condition string) (report protocol.Report, known bool)
	// Bounds limit what one Cluster can store. The zero value sets no limit.
	Bounds Bounds
	// Crowded reports whether ended claims of a Cluster have to go early, because of what all
	// Clusters have together. It must not block. Nil means never.
	Crowded func(cluster types.NamespacedName) bool
	// Coalesce is the minimum time between two writes of one ledger that no call waits for. Zero
	// means one second.
	Coalesce time.Duration
}

// Key names a claim.
type Key struct {
	Namespace, Cluster, ID string
}

func (k Key) object() types.NamespacedName {
	return types.NamespacedName{Namespace: k.Namespace, Name: v1alpha1.ObjectName(k.Cluster, k.ID)}
}

// Holders reports whether a caller may act as the given holder. Nil allows any.
type Holders func(holder string) bool

// check returns [ErrForeignHolder] if the claim is another holder's. An ended claim belongs to no
// holder.
func (h Holders) check(c *v1alpha1.MachineClaim) error {
	if h == nil || c.CurrentPhase() == v1alpha1.PhaseEnded || h(c.Spec.Holder) {
		return nil
	}
	return ErrForeignHolder
}

// Engine makes, binds and releases claims. It is safe for concurrent use, and several may run
// against one hub.
type Engine struct {
	Config
	spawn    func(func()) // runs a group outside its caller; tests run it in place
	parallel int          // writes that one step does at once
	decide   func(*protocol.Snapshot) *protocol.Decision
	started  time.Time
	// withdraws means that the agent is being uninstalled: releases in progress are completed, and
	// nothing else is begun.
	withdraws bool
	// ledgerBudget is how many bytes all entries of one ledger may take; zero means
	// [protocol.LedgerBudget]. Tests lower it.
	ledgerBudget int
	// id distinguishes this agent from the others that write ledgers. If it is not unique, only the
	// order in which agents act is affected.
	id      string
	written ownWrites
	turns   turns // of runs for calls
	writes  turns // of writes on claims and Machines
	lists   batchread.Reads[sameLists, string, []v1alpha1.MachineClaim]
	// deference is how long a node group is left to the agent that last wrote its ledger; see
	// [group.deferToOther]. Tests set it.
	deference time.Duration
	// prunesRepairs is set once the API server did not keep spec.holderRepairs of a claim.
	prunesRepairs atomic.Bool

	mu      sync.Mutex
	groups  map[types.NamespacedName]*group
	reports map[types.NamespacedName]nodeReport // by Cluster
	// queue is the controller's. It is nil until the controller starts.
	queue   workqueue.TypedRateLimitingInterface[reconcile.Request]
	synced  map[holderKey]map[types.UID]bool  // the claims that a holder's last live set decided
	repairs map[holderKey]repairSetting       // what holders with claims say in their live sets
	numbers map[types.NamespacedName]*numbers // by Cluster
	// unusable holds, by MachineDeployment, why its ledger cannot be used, as it was logged last.
	unusable map[types.NamespacedName]string
}

// New returns an engine that acts only on calls until [Engine.SetupWithManager] connects it to the
// hub's events.
func New(c Config) *Engine {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.SpareGrace == 0 {
		c.SpareGrace = time.Minute
	}
	if c.TombstoneRetention == 0 {
		c.TombstoneRetention = 24 * time.Hour
	}
	if c.CollectGrace == 0 {
		c.CollectGrace = 30 * time.Second
	}
	if c.TokenLife == 0 {
		c.TokenLife = 10 * time.Minute
	}
	if c.Coalesce == 0 {
		c.Coalesce = time.Second
	}
	return &Engine{
		Config: c, id: idOf(c.Name), deference: deference, written: newOwnWrites(c.Clock),
		started: c.Clock.Now(), spawn: func(run func()) { go run() }, parallel: parallelWrites, decide: protocol.Decide,
		groups: map[types.NamespacedName]*group{}, reports: map[types.NamespacedName]nodeReport{},
		synced: map[holderKey]map[types.UID]bool{}, repairs: map[holderKey]repairSetting{},
		numbers: map[types.NamespacedName]*numbers{}, unusable: map[types.NamespacedName]string{},
	}
}

// idOf returns the id with which an agent of this name signs ledgers. It stays the same after a
// restart, so that the agent continues its own unfinished work at once.
func idOf(name string) string {
	if name == "" {
		return rand.String(8)
	}
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(name))
	return fmt.Sprintf("%08x", sum.Sum32())
}

// nodeReport is the last report of one Cluster's holder; see [nodesOf].
type nodeReport struct {
	nodes map[string]bool // not changed after it was made
	at    time.Time
}

// reportLife is how long a report of Nodes stays valid without renewal.
const reportLife = 2 * time.Minute

// recordReport stores which Nodes of the Cluster are registered and returns the previous report if
// it is still valid.
func (e *Engine) recordReport(cluster types.NamespacedName, nodes map[string]bool) (before map[string]bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if last := e.reports[cluster]; !e.expired(last) {
		before = last.nodes
	}
	e.reports[cluster] = nodeReport{nodes: nodes, at: e.Clock.Now()}
	maps.DeleteFunc(e.reports, func(_ types.NamespacedName, r nodeReport) bool { return e.expired(r) }) // of Clusters that are gone
	return before
}

func (e *Engine) expired(r nodeReport) bool { return e.Clock.Since(r.at) > reportLife }

// reportedNodes returns, by provider ID, whether the Cluster's Nodes are registered as its holder
// reported last. It is nil when there is no valid report.
func (e *Engine) reportedNodes(cluster types.NamespacedName) map[string]bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if report := e.reports[cluster]; !e.expired(report) {
		return report.nodes
	}
	return nil
}

func (e *Engine) event(object runtime.Object, reason, action, message string) {
	switch {
	case e.Recorder == nil:
	case protocol.IsTrouble(reason):
		e.warn(object, reason, action, message)
	default:
		e.Recorder.Eventf(object, nil, corev1.EventTypeNormal, reason, action, "%s", message)
	}
}

// warn records a Warning event for something that a person has to look at.
func (e *Engine) warn(object runtime.Object, reason, action, message string) {
	if e.Recorder != nil {
		e.Recorder.Eventf(object, nil, corev1.EventTypeWarning, reason, action, "%s", message)
	}
}

// conflictOr turns a lost race into [ErrConflict] and wraps any other error.
func conflictOr(err error, doing string) error {
	if lostRace(err) {
		return fmt.Errorf("%s: %w", doing, ErrConflict)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
