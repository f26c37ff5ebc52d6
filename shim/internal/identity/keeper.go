// Package identity maintains the identity with which the shim calls the agent: a private key that
// never leaves the spoke, and the client certificate that the agent issues for it. Both are stored
// in one secret of the spoke.
//
// # Enrollment
//
// `capi-agent onboard` writes a bootstrap certificate into another secret. That certificate names
// its onboarding by an id, and it serves only one public key: the first that it is used with.
// Therefore the keeper first stores the new key, then calls the agent, then stores the certificate
// in place of the previous one. After a crash or a lost answer it uses the stored key again. The
// keeper uses a bootstrap certificate if its onboarding differs from that of the present
// certificate: the agent accepts it only if it has ended the present one.
//
// # Renewal
//
// Each renewal of the present certificate uses a new key, and both are stored in one update. If the
// secret has lost its certificate, the one in memory is renewed. If the secret was deleted, it is
// created again before the agent is called, so that the agent issues nothing that cannot be stored.
//
// # Replicas
//
// Every replica regularly reads the identity secret into a [certificates.Held], from which new
// connections take the certificate. Only the leader requests certificates. If a former leader still
// writes, the API server refuses one of the two writes, and that replica uses what the other has
// stored. A certificate in use is replaced only by a usable one and, until it expires, not by one
// of an earlier onboarding.
package identity

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
)

const (
	// interval is how often the secrets are read.
	interval = 10 * time.Second
	// jitter is the maximum extension of waits, as a fraction, so that the replicas of a fleet do
	// not call at the same time.
	jitter = 0.2
	// issuersSkew is how much earlier a certificate's validity may begin than that of another one
	// issued before it: agents backdate what they issue, other issuers may not, and the clocks of
	// two agents differ.
	issuersSkew = 5 * time.Minute
	// callTimeout bounds a call to the spoke's API server.
	callTimeout = 30 * time.Second
)

// Reasons of announcements.
const (
	reasonRefused = connectivity.ReasonRefused
	reasonEnded   = "AgentCertificateEnded"
	reasonInvalid = "AgentBootstrapInvalid"
)

// Config configures a [Keeper].
type Config struct {
	// Reader reads secrets from the API server, not from a cache, and Writer writes them. REQUIRED.
	Reader client.Reader
	Writer client.Writer
	// Identity is the secret with key and certificate, which the keeper writes. Bootstrap is the
	// secret that `capi-agent onboard` writes. REQUIRED.
	Identity, Bootstrap types.NamespacedName
	// Cluster is the Cluster that the identity belongs to. REQUIRED.
	Cluster *agentv1alpha1.ClusterRef
	// Held receives the content of the identity secret. REQUIRED.
	Held *certificates.Held
	// Agent issues certificates over connections that use the certificate in Held. REQUIRED.
	Agent agentv1alpha1.CertificateServiceClient
	// Connect returns a client that authenticates with another source. The keeper closes it.
	// REQUIRED.
	Connect func(certificates.Source) (*agentclient.Client, error)
	// Announce tells the cluster's users what they must do, once for each new message. REQUIRED.
	Announce func(ctx context.Context, reason, message string)
	// Clock provides the time. REQUIRED.
	Clock clock.Clock
}

// Keeper maintains the identity. As a runnable of a manager it requests certificates, only in the
// leader; [Keeper.Follow] is for every replica.
type Keeper struct {
	Config

	// reading is held while the identity secret is read or written and its content put into use, so
	// that older content does not replace newer.
	reading sync.Mutex
	// unread is the last logged reason why the identity secret could not be used.
	unread string

	// The fields below belong to the leader's goroutine.

	enrollment, renewal attempts
	reported            map[string]string // last message, by reason
}

// NewHeld returns an empty source, whose error states what the shim is waiting for.
func NewHeld(bootstrap types.NamespacedName, cluster *agentv1alpha1.ClusterRef) *certificates.Held {
	return certificates.NewHeld(fmt.Errorf("there is no client certificate yet: %s", waiting(bootstrap, cluster)))
}

func waiting(bootstrap types.NamespacedName, cluster *agentv1alpha1.ClusterRef) string {
	return fmt.Sprintf("waiting for the secret %s, which `capi-agent onboard` writes for the Cluster %s", bootstrap, nameOf(cluster))
}

// New returns a keeper.
func New(c Config) *Keeper {
	return &Keeper{Config: c, reported: map[string]string{}}
}

// Follow returns the runnable that reads the identity secret in every replica.
func (k *Keeper) Follow() *Follower { return &Follower{k} }

// Follower reads the identity secret regularly.
type Follower struct{ keeper *Keeper }

// NeedLeaderElection returns false, so that the manager runs it in every replica.
func (*Follower) NeedLeaderElection() bool { return false }

// Start reads the secret until ctx is done.
func (f *Follower) Start(ctx context.Context) error {
	f.keeper.regularly(ctx, func(ctx context.Context) bool {
		s, err := f.keeper.read(ctx)
		f.keeper.logUnread(ctx, cmp.Or(err, s.unusable))
		return true
	})
	return nil
}

// NeedLeaderElection returns true, so that the manager runs the keeper only in the leader.
func (*Keeper) NeedLeaderElection() bool { return true }

// Start requests certificates until ctx is done.
func (k *Keeper) Start(ctx context.Context) error {
	k.regularly(ctx, func(ctx context.Context) bool {
		if err := k.round(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "maintaining the client certificate")
		}
		return true
	})
	return nil
}

// Obtain acts as the leader until a certificate that has not expired is in use; if there is one
// already, for one round. If a user has to act, it returns at once an error with the remedy. If ctx
// is done first, it returns what it was waiting for. It may run beside the leader.
func (k *Keeper) Obtain(ctx context.Context) error {
	obtained, waitsFor := false, error(nil)
	k.regularly(ctx, func(ctx context.Context) bool {
		err := k.round(ctx)
		present := k.present()
		obtained = present != nil && k.Clock.Now().Before(present.NotAfter) // which is enough, even if the renewal failed
		if obtained {
			return false
		}
		if act := cmp.Or(k.reported[reasonRefused], k.reported[reasonInvalid], k.reported[reasonEnded]); act != "" {
			waitsFor = errors.New(act)
			return false
		}
		if ctx.Err() == nil || waitsFor == nil { // once ctx is done, keep the earlier error
			_, absent := k.Held.Certificate()
			waitsFor = cmp.Or(err, absent, waitsFor)
		}
		return true
	})
	if obtained {
		return nil
	}
	return cmp.Or(waitsFor, ctx.Err())
}

// regularly calls do at intervals until ctx is done or do returns false.
func (k *Keeper) regularly(ctx context.Context, do func(context.Context) bool) {
	for ctx.Err() == nil && do(ctx) {
		timer := k.Clock.NewTimer(wait.Jitter(interval, jitter))
		select {
		case <-ctx.Done():
		case <-timer.C():
		}
		timer.Stop()
	}
}

// read puts the certificate in the identity secret into use, and returns the secret's content. An
// unusable certificate is not an error.
func (k *Keeper) read(ctx context.Context) (stored, error) {
	k.reading.Lock()
	defer k.reading.Unlock()
	s, err := get(ctx, k.Reader, k.Identity)
	if err != nil || s.empty() {
		return s, err
	}
	s.unusable = k.take(s)
	return s, nil
}

// take puts a stored certificate into use, unless it is inferior to the present one, such as after
// a restore from a backup.
func (k *Keeper) take(s stored) error {
	certificate, _, err := s.pem().Parse()
	if present := k.present(); err == nil && present != nil && k.Clock.Now().Before(present.NotAfter) {
		if err := k.superseded(certificate.Leaf, present); err != nil {
			return fmt.Errorf("the certificate in the secret %s %w", k.Identity, err)
		}
	}
	return k.Held.Hold(s.pem())
}

// superseded returns why a stored certificate does not replace the present one, which has not
// expired. Each onboarding ends the earlier ones, so of two onboardings the later one counts.
func (k *Keeper) superseded(stored, present *x509.Certificate) error {
	switch {
	case !k.Clock.Now().Before(stored.NotAfter):
		return fmt.Errorf("expired at %s", stored.NotAfter.UTC().Format(time.RFC3339))
	case onboardingOf(stored) != onboardingOf(present) && stored.NotBefore.Before(present.NotBefore.Add(-issuersSkew)):
		return fmt.Errorf("belongs to another onboarding, and is older than the current one: it begins at %s, and the current one at %s",
			stored.NotBefore.UTC().Format(time.RFC3339), present.NotBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

// logUnread logs why the identity secret cannot be read or used, if the reason has changed.
func (k *Keeper) logUnread(ctx context.Context, err error) {
	k.reading.Lock()
	defer k.reading.Unlock()
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != k.unread && ctx.Err() == nil {
		if k.unread = text; err != nil {
			log.FromContext(ctx).Error(err, "the last client certificate that was read stays in use")
		} else {
			log.FromContext(ctx).Info("the client certificate's secret can be read again")
		}
	}
}

// round checks once, and requests a certificate if one is due. It starts over if another replica
// has written the secret meanwhile.
func (k *Keeper) round(ctx context.Context) error {
	return retry.OnError(retry.DefaultRetry, raced, func() error { return k.reconcile(ctx) })
}

func raced(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }

func (k *Keeper) reconcile(ctx context.Context) error {
	s, err := k.read(ctx)
	if err != nil {
		return err
	}
	b, err := k.bootstrap(ctx)
	if err != nil {
		return err
	}
	present := k.present()
	enrolls := b != nil && (present == nil || b.onboarding != onboardingOf(present))
	if enrolls {
		if done, err := k.tryEnroll(ctx, &s, b); done || err != nil {
			return err
		}
	}
	switch now := k.Clock.Now(); {
	case present == nil:
		if b == nil {
			k.report(ctx, "", waiting(k.Bootstrap, k.Cluster))
		}
		return nil
	case !now.Before(present.NotAfter):
		if !enrolls || b.unusable != nil {
			k.report(ctx, reasonEnded, fmt.Sprintf("The shim's client certificate expired at %s. %s",
				present.NotAfter.UTC().Format(time.RFC3339), k.remedy()))
		}
		return nil
	case now.Before(s.renewAt(present)):
		return nil
	}
	return k.tryRenew(ctx, &s, present)
}

// remedy returns what a user has to do.
func (k *Keeper) remedy() string {
	return fmt.Sprintf("Run `capi-agent onboard` for the Cluster %s again.", nameOf(k.Cluster))
}

// report logs a message, and announces it if it has a reason. It ignores a repetition of the last
// message with the same reason.
func (k *Keeper) report(ctx context.Context, reason, message string) {
	if k.reported[reason] == message {
		return
	}
	k.reported[reason] = message
	if reason == "" {
		log.FromContext(ctx).Info(message)
		return
	}
	log.FromContext(ctx).Error(errors.New(message), "the client certificate needs attention", "reason", reason)
	k.Announce(ctx, reason, message)
	k.Held.Explain(fmt.Errorf("there is no client certificate: %s", message))
}

func nameOf(cluster *agentv1alpha1.ClusterRef) string {
	return cluster.GetNamespace() + "/" + cluster.GetName()
}
