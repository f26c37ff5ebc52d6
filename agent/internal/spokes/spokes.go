// Package spokes maintains the Spoke of each Cluster whose shim calls. A Spoke records what the
// agent must remember of the Cluster's onboarding, and a status for users.
package spokes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

const (
	// noteInterval is how often a Spoke is written if only the time has changed.
	noteInterval = 5 * time.Minute
	// newsInterval is the minimum interval between writes of a Spoke. What a shim reports about
	// itself is not under the agent's control.
	newsInterval = 30 * time.Second
	// silence is how long after its last sync a Spoke is no longer connected. It covers several
	// sync intervals of a shim, and two intervals between writes.
	silence = 3 * noteInterval
	// catchUp is how long an agent must have been able to list the Spokes before it calls one
	// silent. Shims synchronize every minute by default.
	catchUp = 3 * time.Minute
	// lookInterval is how often Spokes are checked for silence.
	lookInterval = time.Minute
	// WriteTimeout is the default of [Config.WriteTimeout].
	WriteTimeout = 5 * time.Second
	page         = 500
)

// Contact describes a shim that has synchronized its claims.
type Contact struct {
	// Version is the shim's user agent, and SpokeID the UID of its namespace kube-system. Either
	// may be empty.
	Version, SpokeID string
	// Matched reports that the shim's live set has an existing claim of the Cluster. Only then does
	// SpokeID replace another one.
	Matched bool
	// Onboarding is the id of the onboarding that the shim's certificate belongs to, "" for none.
	Onboarding string
	// Serial, NotBefore and NotAfter describe the shim's certificate. They are zero for a shim
	// without one.
	Serial              string
	NotBefore, NotAfter time.Time
}

// Config configures [Spokes].
type Config struct {
	// Client reads and writes the hub directly: there are few Spokes, and they are rarely read.
	// REQUIRED.
	Client client.Client
	// Namespaces are the namespaces whose Spokes are checked. Empty means all.
	Namespaces []string
	// Serves reports whether the agent serves a Cluster. REQUIRED.
	Serves func(cluster types.NamespacedName) bool
	// Changed is called when [Spokes.Status] has changed for a Cluster. It must not block. Nil
	// calls nothing.
	Changed func(cluster types.NamespacedName)
	// AgentVersion and APIVersion describe the agent. Spokes show those of the agent that their
	// shim has called last.
	AgentVersion, APIVersion string
	// Recorder records events on Spokes. Nil records none.
	Recorder events.EventRecorder
	// HubTime is the time that is written to Spokes and compared with theirs. All agents of a hub
	// must agree on it. Nil means Clock.
	HubTime clock.PassiveClock
	// Clock measures intervals. REQUIRED.
	Clock clock.WithTicker
	// WriteTimeout limits how long a sync waits for the write of its Spoke, which is repeated later
	// if it fails. Zero means [WriteTimeout].
	WriteTimeout time.Duration
	// Log receives a line if Spokes cannot be written. Zero discards it.
	Log logr.Logger
}

// Spokes maintains the Spokes. It is safe for concurrent use.
type Spokes struct {
	Config

	mu    sync.Mutex
	noted map[types.NamespacedName]note
	// reports are the last reports about NodePools.
	reports map[types.NamespacedName]reported
	// paused is when the Clusters of Spokes that are silent, or nearly so, were last seen to be
	// paused.
	paused map[types.NamespacedName]time.Time
	// seen are the served Spokes, as last read or written.
	seen map[types.NamespacedName]sight
	// failed is the error that was logged last.
	failed string
	// looking is since when this agent has been able to list the Spokes; zero if it was not the
	// last time.
	looking time.Time
}

type note struct {
	contact Contact
	at      time.Time
	failed  bool // to be written
	// wait is how long the next note has to wait because of the Spoke's size: etcd keeps each
	// version of it.
	wait time.Duration
}

// sight is the known status of a Spoke.
type sight struct {
	status v1alpha1.SpokeStatus
	// written is when this agent last wrote it. Reads that began earlier may be older.
	written time.Time
}

// New returns a keeper of Spokes.
func New(c Config) *Spokes {
	if c.Log.GetSink() == nil {
		c.Log = logr.Discard()
	}
	if c.Changed == nil {
		c.Changed = func(types.NamespacedName) {}
	}
	if c.HubTime == nil {
		c.HubTime = c.Clock
	}
	return &Spokes{
		Config: c, noted: map[types.NamespacedName]note{}, reports: map[types.NamespacedName]reported{},
		paused: map[types.NamespacedName]time.Time{}, seen: map[types.NamespacedName]sight{},
	}
}

// ErrOtherKey means that the onboarding's bootstrap certificate has already been used with another
// key.
var ErrOtherKey = errors.New("the bootstrap certificate has been used for another key")

// ErrEnded means that the onboarding is not the Cluster's current one.
var ErrEnded = errors.New("the onboarding has ended")

// ErrNotExpected means that the Cluster's Spoke, which records the use of bootstrap certificates,
// does not expect one of this onboarding. It may have been used before.
var ErrNotExpected = errors.New(
	"the Cluster's Spoke does not expect this bootstrap certificate: the Spoke was deleted since, or an older release onboarded the Cluster")

// Expect records in a Cluster's Spoke that a bootstrap certificate of an onboarding may be used,
// once ([Spokes.Enroll]). It must be called before the onboarding begins. unchanged returns an
// error if the onboarding must not begin; it is called once the Spoke has been read, and no
// concurrent call of Expect for that Spoke succeeds from then on.
func Expect(ctx context.Context, hub client.Client, cluster *clusterv1.Cluster, onboarding string, unchanged func() error) error {
	s := New(Config{Client: hub})
	err := retry.OnError(retry.DefaultBackoff, retryable, func() error {
		spoke := &v1alpha1.Spoke{}
		if err := s.read(ctx, client.ObjectKeyFromObject(cluster), spoke); err != nil {
			return err
		}
		if err := unchanged(); err != nil {
			return err
		}
		if err := s.adopt(cluster, spoke); err != nil {
			return err
		}
		metav1.SetMetaDataLabel(&spoke.ObjectMeta, v1alpha1.OnboardingLabel, onboarding)
		if spoke.ResourceVersion == "" {
			return wrapped(s.Client.Create(ctx, spoke))
		}
		return wrapped(s.Client.Update(ctx, spoke))
	})
	if meta.IsNoMatchError(err) {
		return errNotInstalled
	}
	return err
}

var errNotInstalled = errors.New("the CustomResourceDefinition of Spokes is not installed: upgrade the agent's chart")

// Enroll durably records the public key that the bootstrap certificate of a Cluster's onboarding is
// used with. A repeated call with the same key succeeds; another key fails with [ErrOtherKey]. If
// the onboarding is not the current one, it fails with [ErrEnded], and with [ErrNotExpected] if the
// Spoke that [Expect] wrote is gone.
func (s *Spokes) Enroll(ctx context.Context, name types.NamespacedName, onboarding, publicKey string) error {
	return retry.OnError(retry.DefaultRetry, retryable, func() error {
		spoke := &v1alpha1.Spoke{}
		if err := s.read(ctx, name, spoke); err != nil {
			return err
		}
		// The Cluster is read after the Spoke. If a later onboarding has written the Spoke
		// meanwhile, the write below fails instead of undoing it.
		cluster := &clusterv1.Cluster{}
		switch err := s.Client.Get(ctx, name, cluster); {
		case apierrors.IsNotFound(err):
			return ErrEnded
		case err != nil:
			return fmt.Errorf("reading the Cluster: %w", err)
		case cluster.Labels[v1alpha1.OnboardingLabel] != onboarding:
			return ErrEnded
		}
		switch e := spoke.Spec.Enrollment; {
		case e != nil && e.Onboarding == onboarding && e.PublicKey == publicKey:
			return nil
		case e != nil && e.Onboarding == onboarding:
			s.event(spoke, corev1.EventTypeWarning, "BootstrapCertificateReused", "Issue",
				"a bootstrap certificate was used with a second key, and refused: it may have been stolen. `capi-agent onboard --again` revokes it, "+
					"and the certificate that was issued for the first key")
			return ErrOtherKey
		case spoke.Labels[v1alpha1.OnboardingLabel] != onboarding:
			return ErrNotExpected
		}
		if err := s.clearSpokeID(ctx, spoke); err != nil {
			return err
		}
		if err := s.adopt(cluster, spoke); err != nil {
			return err
		}
		spoke.Spec.Enrollment = &v1alpha1.Enrollment{Onboarding: onboarding, PublicKey: publicKey, Time: metav1.NewTime(s.HubTime.Now())}
		// The update fails if another actor has changed the Spoke.
		return wrapped(s.Client.Update(ctx, spoke))
	})
}

// clearSpokeID forgets which cluster the shim runs in: another one may have been onboarded.
func (s *Spokes) clearSpokeID(ctx context.Context, spoke *v1alpha1.Spoke) error {
	if spoke.Status.SpokeID == "" {
		return nil
	}
	before := spoke.DeepCopy()
	spoke.Status.SpokeID = ""
	optimistic := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := s.Client.Status().Patch(ctx, spoke, optimistic); err != nil {
		return wrapped(err)
	}
	key := client.ObjectKeyFromObject(spoke)
	s.mu.Lock()
	delete(s.noted, key)
	s.mu.Unlock()
	s.wrote(spoke, s.Clock.Now()) // whatever else was written meanwhile
	return nil
}

// Issued describes a certificate that was issued for a Cluster.
type Issued struct {
	Serial   string
	NotAfter time.Time
	// Enrolled is whether it was issued for a bootstrap certificate. Otherwise it is a renewal.
	Enrolled bool
}

// NoteIssued records an event on a Cluster's Spoke, if there is one. Errors are only logged: the
// certificate has been issued.
func (s *Spokes) NoteIssued(ctx context.Context, name types.NamespacedName, issued Issued) {
	spoke := &v1alpha1.Spoke{}
	if err := s.read(ctx, name, spoke); err != nil || spoke.ResourceVersion == "" {
		s.report(err, name)
		return
	}
	how := "renewed"
	if issued.Enrolled {
		how = "issued for a bootstrap certificate"
	}
	// Events that differ in their message alone are counted as one, which shows the first serial
	// number.
	s.event(spoke, corev1.EventTypeNormal, "CertificateIssued", "Issue-"+issued.Serial,
		fmt.Sprintf("the shim's certificate was %s: serial %s, valid until %s", how, issued.Serial, issued.NotAfter.UTC().Format(time.RFC3339)))
}

func (s *Spokes) event(spoke *v1alpha1.Spoke, kind, reason, action, note string) {
	if s.Recorder != nil {
		s.Recorder.Eventf(spoke, nil, kind, reason, action, "%s", note)
	}
}

func wrapped(err error) error {
	if err != nil {
		return fmt.Errorf("writing the Spoke: %w", err)
	}
	return nil
}

// retryable reports whether another agent was faster.
func retryable(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }

// read reads a Cluster's Spoke. If there is none, spoke becomes a new one without a resource
// version.
func (s *Spokes) read(ctx context.Context, name types.NamespacedName, spoke *v1alpha1.Spoke) error {
	err := s.Client.Get(ctx, name, spoke)
	if apierrors.IsNotFound(err) {
		spoke.Namespace, spoke.Name = name.Namespace, name.Name
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the Spoke: %w", err)
	}
	return nil
}

// adopt sets the Cluster as the Spoke's owner, in memory.
func (s *Spokes) adopt(cluster *clusterv1.Cluster, spoke *v1alpha1.Spoke) error {
	metav1.SetMetaDataLabel(&spoke.ObjectMeta, v1alpha1.ClusterLabel, cluster.Name)
	// After a restore, or if the Cluster was recreated, the old reference points to nothing.
	spoke.OwnerReferences = nil
	if err := controllerutil.SetOwnerReference(cluster, spoke, s.Client.Scheme()); err != nil {
		return fmt.Errorf("making the Cluster the Spoke's owner: %w", err)
	}
	return nil
}

// Note records in a Cluster's Spoke that its shim has synchronized, if that is news. Errors are
// only logged: the sync does not depend on the Spoke.
func (s *Spokes) Note(ctx context.Context, cluster *clusterv1.Cluster, contact Contact) {
	key, now := client.ObjectKeyFromObject(cluster), s.Clock.Now()
	if !s.due(key, contact, now) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.WriteTimeout, WriteTimeout))
	defer cancel()
	err := retry.OnError(retry.DefaultRetry, retryable, func() error { return s.write(ctx, cluster, contact, s.HubTime.Now()) })
	if err != nil {
		s.failedToNote(key)
	}
	s.report(err, key)
}

// due reports whether a contact is to be written, and records it as written. A failed write is
// repeated one interval later.
func (s *Spokes) due(key types.NamespacedName, contact Contact, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, known := s.noted[key]
	// Until an id is recorded, any cluster's live set counts as the first one.
	first := contact.SpokeID != "" && s.seen[key].status.SpokeID == "" && !last.failed
	contact.SpokeID, contact.Matched = cmp.Or(contact.SpokeID, last.contact.SpokeID), false // those are no news
	least := noteInterval
	// Another cluster is recorded no more often than the time, because claims are rewritten then.
	if last.contact != contact && last.contact.SpokeID == contact.SpokeID {
		least = newsInterval
	}
	if known && !first && now.Sub(last.at) < max(least, last.wait) {
		return false
	}
	status := s.seen[key].status
	s.noted[key] = note{contact: contact, at: now, wait: Report{status.NodePools, status.MoreNodePools, status.Published}.interval()}
	return true
}

// failedToNote records that what was last noted of a Cluster is not written.
func (s *Spokes) failedToNote(key types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last, known := s.noted[key]; known {
		last.failed = true
		s.noted[key] = last
	}
}

// write fails with a conflict if another actor writes the Spoke meanwhile.
func (s *Spokes) write(ctx context.Context, cluster *clusterv1.Cluster, contact Contact, now time.Time) error {
	began := s.Clock.Now()
	spoke := &v1alpha1.Spoke{}
	if err := s.read(ctx, client.ObjectKeyFromObject(cluster), spoke); err != nil {
		return err
	}
	// The Cluster may have been onboarded again during the call. The contact is that of the shim
	// before.
	if e := spoke.Spec.Enrollment; e != nil && contact.Onboarding != "" && contact.Onboarding != e.Onboarding {
		return nil
	}
	if err := s.keepOwned(ctx, cluster, spoke); err != nil {
		return err
	}
	before := spoke.DeepCopy()
	status := &spoke.Status
	if status.LastSyncTime == nil || status.LastSyncTime.Time.Before(now.Add(-noteInterval/2)) {
		status.LastSyncTime = new(metav1.NewTime(now))
	}
	status.ShimVersion, status.Certificate = contact.Version, nil
	if contact.SpokeID != "" && (status.SpokeID == "" || contact.Matched) {
		status.SpokeID = contact.SpokeID
	}
	status.AgentVersion, status.APIVersion = s.AgentVersion, s.APIVersion
	if !contact.NotAfter.IsZero() {
		status.Certificate = &v1alpha1.SpokeCertificate{
			Serial: contact.Serial, NotBefore: new(metav1.NewTime(contact.NotBefore)), NotAfter: new(metav1.NewTime(contact.NotAfter)),
		}
	}
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: v1alpha1.ConnectedCondition, Status: metav1.ConditionTrue, Reason: v1alpha1.SynchronizedReason,
		Message: "The shim synchronizes its claims.", LastTransitionTime: metav1.NewTime(now),
	})
	if equality.Semantic.DeepEqual(before.Status, spoke.Status) { // another agent has written it
		s.see(client.ObjectKeyFromObject(spoke), &spoke.Status, began, time.Time{})
		return nil
	}
	if err := s.Client.Status().Patch(ctx, spoke, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("writing the Spoke's status: %w", err)
	}
	s.wrote(spoke, began)
	return nil
}

// keepOwned creates the Spoke if it does not exist, and makes the Cluster its owner.
func (s *Spokes) keepOwned(ctx context.Context, cluster *clusterv1.Cluster, spoke *v1alpha1.Spoke) error {
	before := spoke.DeepCopy()
	if err := s.adopt(cluster, spoke); err != nil {
		return err
	}
	switch {
	case spoke.ResourceVersion == "":
		return wrapped(s.Client.Create(ctx, spoke))
	// After a restore, the owner is gone.
	case !equality.Semantic.DeepEqual(before.ObjectMeta, spoke.ObjectMeta):
		return wrapped(s.Client.Update(ctx, spoke))
	}
	return nil
}

// Status returns what was last read or written of a Cluster's Spoke: by this agent at once, by
// another one at the next [Spokes.Look]. It is false if there is none.
func (s *Spokes) Status(cluster types.NamespacedName) (v1alpha1.SpokeStatus, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known, is := s.seen[cluster]
	return known.status, is
}

// SpokeID returns the id of the cluster whose shim last synchronized a Cluster's claims, "" if none
// has since the Cluster was onboarded, or if the agent does not know yet. It knows what another
// agent has recorded from the next [Spokes.Look] on.
func (s *Spokes) SpokeID(cluster types.NamespacedName) string {
	status, _ := s.Status(cluster)
	return status.SpokeID
}

// ReadSpokeID is [Spokes.SpokeID] with what every agent has recorded. It asks the hub. Where Spokes
// are not installed, the id is "".
func (s *Spokes) ReadSpokeID(ctx context.Context, cluster types.NamespacedName) (string, error) {
	began := s.Clock.Now()
	spoke := &v1alpha1.Spoke{}
	if err := s.read(ctx, cluster, spoke); meta.IsNoMatchError(err) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	if spoke.ResourceVersion == "" {
		s.see(cluster, nil, began, time.Time{})
		return "", nil
	}
	s.see(cluster, &spoke.Status, began, time.Time{})
	return spoke.Status.SpokeID, nil
}

// wrote is [Spokes.see] for a Spoke that this agent has just written, after a read that began at
// the given time.
func (s *Spokes) wrote(spoke *v1alpha1.Spoke, began time.Time) {
	s.see(client.ObjectKeyFromObject(spoke), &spoke.Status, began, s.Clock.Now())
}

// see records the status of a Spoke that was read by a request which began at the given time, or
// was written based on it; nil if there is no Spoke. What was written since then is newer, and
// stays. written is zero for a read.
func (s *Spokes) see(key types.NamespacedName, status *v1alpha1.SpokeStatus, began, written time.Time) {
	s.mu.Lock()
	before, known := s.seen[key]
	changed := false
	switch {
	case before.written.After(began):
	case status != nil:
		if written.IsZero() {
			written = before.written
		}
		s.seen[key] = sight{status: *status, written: written}
		changed = !known || !equality.Semantic.DeepEqual(before.status, *status)
	default:
		delete(s.seen, key)
		changed = known
	}
	s.mu.Unlock()
	if changed {
		s.Changed(key)
	}
}

// seeAll replaces what is known of the Spokes by a complete listing, which began at the given time.
// What was written since then is newer, and stays. What is known of the unread ones stays, too.
func (s *Spokes) seeAll(all map[types.NamespacedName]v1alpha1.SpokeStatus, unread map[types.NamespacedName]bool, began time.Time) {
	next := make(map[types.NamespacedName]sight, len(all))
	var changed []types.NamespacedName
	s.mu.Lock()
	for key, status := range all {
		next[key] = sight{status: status, written: s.seen[key].written}
	}
	for key, known := range s.seen {
		if unread[key] || known.written.After(began) {
			next[key] = known
		} else if _, remains := all[key]; !remains {
			changed = append(changed, key)
		}
	}
	for key, now := range next {
		if before, known := s.seen[key]; !known || !equality.Semantic.DeepEqual(before.status, now.status) {
			changed = append(changed, key)
		}
	}
	s.seen = next
	s.mu.Unlock()
	for _, key := range changed {
		s.Changed(key)
	}
}

// report logs an error, unless it was logged last.
func (s *Spokes) report(err error, about types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return
	}
	if _, panicked := errors.AsType[*panics.Error](err); panicked {
		return // it is logged already
	}
	text := err.Error()
	if meta.IsNoMatchError(err) {
		err = errNotInstalled
		text = err.Error() // the same for every Cluster
	}
	if text != s.failed {
		s.failed = text
		s.Log.Error(err, "a Spoke cannot be written", "cluster", about.String())
	}
}

// Run marks silent Spokes until the context ends. Several agents may do so concurrently.
func (s *Spokes) Run(ctx context.Context) error {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if err := s.Look(ctx); err != nil && ctx.Err() == nil {
			s.report(err, types.NamespacedName{})
		}
	}, lookInterval)
	return nil
}

// Look marks silent Spokes once. After a time without the hub or without an agent, shims first get
// the time to synchronize: their silence is not theirs.
func (s *Spokes) Look(ctx context.Context) error {
	s.forget()
	now := s.Clock.Now()
	s.mu.Lock()
	if s.looking.IsZero() {
		s.looking = now
	}
	waits := now.Sub(s.looking) < catchUp
	s.mu.Unlock()
	if waits {
		return s.Read(ctx)
	}
	return s.readAll(ctx, s.lookAt)
}

// Read reads the Spokes, and changes none.
func (s *Spokes) Read(ctx context.Context) error {
	return s.readAll(ctx, func(context.Context, *v1alpha1.Spoke) error { return nil })
}

// readAll calls a function for each served Spoke, and then sees it. A function that fails leaves
// the Spoke as it was read.
func (s *Spokes) readAll(ctx context.Context, do func(context.Context, *v1alpha1.Spoke) error) error {
	began := s.Clock.Now()
	all, unread := map[types.NamespacedName]v1alpha1.SpokeStatus{}, map[types.NamespacedName]bool{}
	complete, err := each(ctx, s.Client, s.Namespaces, func(ctx context.Context, spoke *v1alpha1.Spoke) error {
		key := client.ObjectKeyFromObject(spoke)
		unread[key] = true // it stays so after a panic
		var err error
		if s.Serves(key) {
			err = do(ctx, spoke)
			all[key] = spoke.Status
		}
		delete(unread, key)
		return err
	})
	if complete { // else Spokes may be missing
		s.seeAll(all, unread, began)
	} else if len(all) == 0 { // not only one namespace is missing
		s.mu.Lock()
		s.looking = time.Time{} // the hub is away, perhaps for the shims as well
		s.mu.Unlock()
	}
	return err
}

// forget drops the notes of Clusters that have been silent for a while: they may no longer exist.
func (s *Spokes) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, n := range s.noted {
		if s.Clock.Since(n.at) >= silence {
			delete(s.noted, name)
		}
	}
	for name, at := range s.paused {
		if s.Clock.Since(at) >= silence {
			delete(s.paused, name)
		}
	}
	for name, r := range s.reports {
		if s.Clock.Since(r.at) >= silence {
			delete(s.reports, name)
		}
	}
}

// each calls a function for every Spoke in the namespaces. No namespaces means all. complete is
// false if not all Spokes could be listed.
func each(
	ctx context.Context, c client.Client, namespaces []string, do func(context.Context, *v1alpha1.Spoke) error,
) (complete bool, err error) {
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	complete = true
	var errs []error
	for _, namespace := range namespaces {
		for next, first := "", true; first || next != ""; first = false {
			var list v1alpha1.SpokeList
			if err := c.List(ctx, &list, client.InNamespace(namespace), client.Limit(page), client.Continue(next)); err != nil {
				errs = append(errs, fmt.Errorf("listing Spokes: %w", err))
				complete = false
				break
			}
			for i := range list.Items {
				errs = append(errs, doOne(ctx, &list.Items[i], do))
			}
			next = list.Continue
		}
	}
	return complete, errors.Join(errs...)
}

// doOne turns a panic into an error, because one Spoke must not end the process that serves all
// Clusters.
func doOne(ctx context.Context, spoke *v1alpha1.Spoke, do func(context.Context, *v1alpha1.Spoke) error) error {
	return panics.Confined(log.FromContext(ctx), panics.Objects, "a Spoke is left as it is because of a bug in the agent",
		func() error { return do(ctx, spoke) }, "spoke", client.ObjectKeyFromObject(spoke).String())
}

// Remove deletes the Spokes of the served Clusters, and returns their number.
func Remove(
	ctx context.Context, c client.Client, namespaces []string, serves func(cluster types.NamespacedName) bool,
) (removed int, err error) {
	_, err = each(ctx, c, namespaces, func(ctx context.Context, spoke *v1alpha1.Spoke) error {
		if !serves(client.ObjectKeyFromObject(spoke)) {
			return nil
		}
		if err := c.Delete(ctx, spoke); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting the Spoke %s: %w", client.ObjectKeyFromObject(spoke), err)
		}
		removed++
		return nil
	})
	// The installation never had Spokes.
	if meta.IsNoMatchError(err) {
		err = nil
	}
	return removed, err
}

// held reports whether the Cluster is paused, or was a short time ago. No live set of it is
// accepted while it is, and a Spoke that is being moved is not written. Thereafter the shim first
// gets the time to synchronize.
func (s *Spokes) held(ctx context.Context, name types.NamespacedName) (bool, error) {
	var cluster clusterv1.Cluster
	if err := s.Client.Get(ctx, name, &cluster); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("reading the Cluster %s: %w", name, err)
	}
	now := s.Clock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if eligibility.ClusterPaused(&cluster) {
		s.paused[name] = now
	}
	at, was := s.paused[name]
	return was && now.Sub(at) < catchUp, nil
}

func (s *Spokes) lookAt(ctx context.Context, spoke *v1alpha1.Spoke) error {
	now := s.HubTime.Now()
	last := spoke.Status.LastSyncTime
	switch connected := meta.FindStatusCondition(spoke.Status.Conditions, v1alpha1.ConnectedCondition); {
	case connected != nil && connected.Status != metav1.ConditionTrue:
		return nil
	case connected == nil && spoke.Spec.Enrollment == nil:
		return nil // The spoke may not exist yet.
	case connected == nil:
		last = &spoke.Spec.Enrollment.Time
	}
	if last != nil && now.Sub(last.Time) < silence-catchUp {
		return nil
	}
	if held, err := s.held(ctx, client.ObjectKeyFromObject(spoke)); held || err != nil || last != nil && now.Sub(last.Time) < silence {
		return err
	}
	before := spoke.DeepCopy()
	meta.SetStatusCondition(&spoke.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConnectedCondition, Status: metav1.ConditionFalse, Reason: v1alpha1.SilentReason, LastTransitionTime: metav1.NewTime(now),
		Message: "The shim has not synchronized its claims for 15 minutes: it does not run, its certificate is refused, or it cannot reach the agent.",
	})
	// The patch fails if another actor has written the Spoke meanwhile: the shim may be back.
	err := s.Client.Status().Patch(ctx, spoke, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		spoke.Status = before.Status
	}
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("writing the Spoke's status: %w", err)
	}
	return nil
}
