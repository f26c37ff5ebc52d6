package identity

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// patience is the timeout of every wait.
const patience = 20 * time.Second

var (
	identitySecret  = types.NamespacedName{Namespace: "karpenter", Name: "karpenter-agent-identity"}
	bootstrapSecret = types.NamespacedName{Namespace: "karpenter", Name: "karpenter-agent-bootstrap"}
	production      = &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"}
)

// environment is the API server of a spoke, and the agent of a hub.
type environment struct {
	t     *testing.T
	ctx   context.Context //nolint:containedctx // The length of the test, with its logger.
	clock *clocktesting.FakeClock
	agent *agent
	kube  client.WithWatch
	// disturb is called for each call to the API server, before and after it takes effect. Nil does
	// nothing.
	disturb func(verb string, object client.Object, done bool) error

	mu   sync.Mutex
	logs strings.Builder
	keys []string // all keys that were ever in a secret
}

func newEnvironment(t *testing.T) *environment {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := &environment{t: t, clock: clk, agent: serve(t, clk)}
	w.ctx = log.IntoContext(t.Context(), w.logger())
	around := func(verb string, object client.Object, call func() error) error {
		w.keep(object)
		if w.disturb == nil {
			return call()
		}
		if err := w.disturb(verb, object, false); err != nil {
			return err
		}
		if err := call(); err != nil {
			return err
		}
		return w.disturb(verb, object, true)
	}
	w.kube = fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, object client.Object, opts ...client.GetOption) error {
			return around("get", object, func() error { return c.Get(ctx, key, object, opts...) })
		},
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, opts ...client.CreateOption) error {
			return around("create", object, func() error { return c.Create(ctx, object, opts...) })
		},
		Update: func(ctx context.Context, c client.WithWatch, object client.Object, opts ...client.UpdateOption) error {
			return around("update", object, func() error { return c.Update(ctx, object, opts...) })
		},
	}).Build()
	t.Cleanup(w.noKeyWasLogged)
	return w
}

func (w *environment) logger() logr.Logger {
	return funcr.New(func(_, line string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.logs.WriteString(line + "\n")
	}, funcr.Options{Verbosity: 9})
}

func (w *environment) logged() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.logs.String()
}

// keep records the keys that are written.
func (w *environment) keep(object client.Object) {
	secret, ok := object.(*corev1.Secret)
	if !ok {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for entry, value := range secret.Data {
		if strings.HasSuffix(entry, ".key") && len(value) > 0 {
			w.keys = append(w.keys, string(value))
		}
	}
}

func (w *environment) noKeyWasLogged() {
	text := w.logged()
	assert.NotContains(w.t, text, "PRIVATE KEY-")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range w.keys {
		w.hasNoKey(text, key)
	}
}

func (w *environment) hasNoKey(text, key string) {
	for line := range strings.SplitSeq(strings.TrimSpace(key), "\n") {
		if !strings.HasPrefix(line, "-----") {
			assert.NotContains(w.t, text, line)
		}
	}
}

// replica is one process of the shim.
type replica struct {
	*Keeper

	w         *environment
	client    *agentclient.Client
	announced []string
}

func (w *environment) replica() *replica {
	w.t.Helper()
	r := &replica{w: w}
	held := NewHeld(bootstrapSecret, production)
	connect := func(source certificates.Source) (*agentclient.Client, error) {
		return agentclient.New(agentclient.Options{
			Address: w.agent.address, TLS: &agentclient.TLS{Source: source, ServerName: serverName}, Logger: w.logger(), Timeout: 5 * time.Second,
		})
	}
	var err error
	r.client, err = connect(held)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, r.client.Close()) })
	r.Keeper = New(Config{
		Reader: w.kube, Writer: w.kube, Identity: identitySecret, Bootstrap: bootstrapSecret, Cluster: production,
		Held: held, Agent: r.client.Issuer, Connect: connect, Clock: w.clock,
		Announce: func(_ context.Context, reason, message string) {
			r.announced = append(r.announced, reason+": "+message)
		},
	})
	return r
}

// looks runs one round as the leader.
func (r *replica) looks() {
	r.w.t.Helper()
	require.NoError(r.w.t, r.round(r.w.ctx))
}

func (r *replica) calls() error {
	_, err := r.client.NodeGroups.ListNodeGroups(r.w.ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: production})
	return err
}

// works waits until the agent accepts the replica's calls for its Cluster.
func (r *replica) works() {
	r.w.t.Helper()
	require.Eventually(r.w.t, func() bool { return r.calls() == nil }, patience, 5*time.Millisecond)
}

func (w *environment) secret(name types.NamespacedName) *corev1.Secret {
	w.t.Helper()
	secret := &corev1.Secret{}
	require.NoError(w.t, w.kube.Get(w.t.Context(), name, secret))
	return secret
}

// put writes a secret, as a user does.
func (w *environment) put(name types.NamespacedName, data map[string][]byte) {
	w.t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	err := w.kube.Get(w.t.Context(), name, secret)
	secret.Data = data
	if apierrors.IsNotFound(err) {
		require.NoError(w.t, w.kube.Create(w.t.Context(), secret))
		return
	}
	require.NoError(w.t, err)
	require.NoError(w.t, w.kube.Update(w.t.Context(), secret))
}

// stored returns the certificate in the identity secret, which must also hold its key.
func (w *environment) stored() *x509.Certificate {
	w.t.Helper()
	certificate, _, err := stored{secret: w.secret(identitySecret)}.pem().Parse()
	require.NoError(w.t, err)
	return certificate.Leaf
}

// enrolled returns a replica with a certificate of the onboarding "first".
func (w *environment) enrolled() *replica {
	w.t.Helper()
	w.put(bootstrapSecret, w.agent.onboard("first"))
	r := w.replica()
	r.looks()
	r.works()
	return r
}

func TestAShimGetsItsCertificateByItsBootstrap(t *testing.T) {
	w := newEnvironment(t)
	r := w.replica()
	r.looks()
	require.ErrorContains(t, r.calls(), "waiting for the secret karpenter/karpenter-agent-bootstrap, which `capi-agent onboard` writes for the Cluster "+
		"team-a/production")
	require.Empty(t, w.agent.served())

	w.put(bootstrapSecret, w.agent.onboard("first"))
	r.looks()
	r.works()
	require.Equal(t, name{"cluster", "team-a/production", "first"}, nameIn(w.stored()))
	secret := w.secret(identitySecret)
	require.Equal(t, corev1.SecretTypeOpaque, secret.Type)
	require.ElementsMatch(t, []string{"tls.crt", "tls.key", "ca.crt"}, keysOf(secret.Data))
	require.NotContains(t, secret.Annotations, EnrollmentAnnotation)
	block, _ := pem.Decode(secret.Data["tls.key"])
	require.Equal(t, "PRIVATE KEY", block.Type, "PKCS #8")

	for range 3 {
		w.clock.Step(time.Minute)
		r.looks()
	}
	require.Len(t, w.agent.served(), 1, "a bootstrap certificate of the same onboarding is not used again")
	require.Empty(t, r.announced)
}

func keysOf(data map[string][]byte) []string {
	var keys []string
	for key := range data {
		keys = append(keys, key)
	}
	return keys
}

func TestAnEmptySecretThatIsThereIsUsed(t *testing.T) {
	w := newEnvironment(t)
	w.put(identitySecret, nil)
	before := w.secret(identitySecret).UID
	w.enrolled()
	require.Equal(t, before, w.secret(identitySecret).UID)
}

func TestTheKeyIsStoredBeforeTheBootstrapIsUsed(t *testing.T) {
	w := newEnvironment(t)
	w.put(bootstrapSecret, w.agent.onboard("first"))
	var atCall *corev1.Secret
	w.agent.before = func() error {
		atCall = w.secret(identitySecret)
		return nil
	}
	w.replica().looks()
	key, err := decodeKey(atCall.Data[EnrollmentKey])
	require.NoError(t, err)
	require.Equal(t, "first", atCall.Annotations[EnrollmentAnnotation])
	require.Equal(t, []request{{"/bootstrap/team-a/production/first", fingerprint(t, key.Public())}}, w.agent.served())
	require.Equal(t, fingerprint(t, key.Public()), fingerprint(t, w.stored().PublicKey))
}

func TestAKeyThatCannotBeStoredIsNotCertified(t *testing.T) {
	w := newEnvironment(t)
	w.put(bootstrapSecret, w.agent.onboard("first"))
	w.disturb = func(verb string, _ client.Object, done bool) error {
		if verb == "create" && !done {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, identitySecret.Name, errors.New("no"))
		}
		return nil
	}
	r := w.replica()
	require.ErrorContains(t, r.round(w.ctx), "the secret karpenter/karpenter-agent-identity does not exist, and Karpenter may not create it: "+
		"`helm upgrade` makes it again")
	require.NoError(t, r.round(w.ctx), "not again at once")
	require.ErrorContains(t, r.calls(), "forbidden")
	require.Empty(t, w.agent.served())
	w.disturb = nil
	w.clock.Step(time.Minute)
	r.looks()
	r.works()
}

func TestALostAnswerIsAskedForAgainWithTheSameKey(t *testing.T) {
	for name, restarts := range map[string]bool{"by the same process": false, "by the next process": true} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			w.put(bootstrapSecret, w.agent.onboard("first"))
			r := w.replica()
			w.agent.answers(nil, lost)
			require.ErrorContains(t, r.round(w.ctx), "lost")
			w.agent.answers(nil, nil)
			if restarts {
				r = w.replica()
			}
			w.clock.Step(time.Minute)
			r.looks()
			r.works()
			served := w.agent.served()
			require.Len(t, served, 2)
			require.Equal(t, served[0], served[1])
		})
	}
}

// The process may end at every step of enrolling and of renewing, before or after the step takes
// effect.
func TestAProcessMayEndAtAnyStep(t *testing.T) {
	for _, renews := range []bool{false, true} {
		for _, applied := range []bool{false, true} {
			for step := 1; ; step++ {
				steps := 0
				t.Run(fmt.Sprintf("renewal %t, step %d, applied %t", renews, step, applied), func(t *testing.T) {
					w := newEnvironment(t)
					w.put(bootstrapSecret, w.agent.onboard("first"))
					if renews {
						w.replica().looks()
						w.clock.Step(lifetime/2 + time.Minute)
					}
					before := len(w.agent.served())
					doomed, end := w.replica(), context.CancelFunc(nil)
					ctx, cancel := context.WithCancel(w.ctx)
					end = cancel
					at := func(done bool) error {
						if done == applied {
							if steps++; steps == step {
								end()
							}
						}
						if steps >= step && (steps > step || done == applied) {
							return lost
						}
						return nil
					}
					w.disturb = func(_ string, _ client.Object, done bool) error { return at(done) }
					w.agent.before, w.agent.after = func() error { return at(false) }, func() error { return at(true) }
					_ = doomed.round(ctx)
					end()

					w.disturb = nil
					w.agent.answers(nil, nil)
					next := w.replica()
					next.looks()
					next.works()
					require.Equal(t, name{"cluster", "team-a/production", "first"}, nameIn(w.stored()))
					require.Empty(t, next.announced)
					keys := map[string]bool{}
					for _, r := range w.agent.served()[before:] {
						keys[r.key] = true
						if renews {
							require.Equal(t, "/cluster/team-a/production/first", r.by)
						}
					}
					if !renews {
						require.Len(t, keys, 1, "one key for one bootstrap certificate")
					}
				})
				if steps < step || t.Failed() {
					require.GreaterOrEqual(t, step, 5, "secrets are read, the agent is called, and secrets are written")
					break
				}
			}
		}
	}
}

func TestACertificateIsRenewedInTimeWithANewKey(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	first := w.stored()
	at, err := time.Parse(time.RFC3339, w.secret(identitySecret).Annotations[RenewAtAnnotation])
	require.NoError(t, err)
	require.WithinRange(t, at, w.clock.Now().Add(lifetime*45/100-time.Minute), w.clock.Now().Add(lifetime/2))

	w.clock.Step(lifetime * 4 / 10)
	r.looks()
	require.Equal(t, first, w.stored(), "it is not due yet")

	restarted := w.replica() // which also knows when a renewal is due
	w.clock.Step(lifetime / 10)
	restarted.looks()
	require.NotEqual(t, first, w.stored())
	require.NotEqual(t, first.PublicKey, w.stored().PublicKey)
	require.Equal(t, "/cluster/team-a/production/first", w.agent.served()[1].by)
	restarted.works()

	_, err = r.read(w.ctx) // the other replica
	require.NoError(t, err)
	require.Equal(t, w.stored(), r.present())
}

func TestACertificateWithoutATimeIsRenewedAtHalfOfItsLife(t *testing.T) {
	for name, annotation := range map[string]string{"none": "", "no time": "soon", "one of an earlier certificate": "2020-01-01T00:00:00Z"} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			r := w.enrolled()
			secret := w.secret(identitySecret)
			secret.Annotations[RenewAtAnnotation] = annotation
			require.NoError(t, w.kube.Update(w.t.Context(), secret))
			w.clock.Step(lifetime*5/10 - 5*time.Minute)
			r.looks()
			require.Len(t, w.agent.served(), 1)
			w.clock.Step(10 * time.Minute)
			r.looks()
			require.Len(t, w.agent.served(), 2)
		})
	}
}

func TestFailedRenewalsAreRepeatedWithBackoff(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	w.clock.Step(lifetime / 2)
	unavailable := status.Error(codes.Internal, "no disk") // a code that the client does not retry itself
	w.agent.answers(unavailable, nil)
	const step = 5 * time.Second
	var waits []time.Duration
	tries := len(w.agent.served())
	last := w.clock.Now()
	for len(waits) < 8 {
		_ = r.round(w.ctx)
		if served := len(w.agent.served()); served > tries {
			waits, tries, last = append(waits, w.clock.Since(last)), served, w.clock.Now()
		}
		w.clock.Step(step)
	}
	require.Zero(t, waits[0])
	for i, wait := range waits[1:6] {
		least := interval << i
		require.GreaterOrEqual(t, wait, min(least, 5*time.Minute))
		require.LessOrEqual(t, wait, min(least*12/10, 6*time.Minute)+step)
	}
	require.LessOrEqual(t, waits[7], 6*time.Minute+step, "it is bounded")
	require.NoError(t, r.calls(), "the present certificate stays in force")
	w.agent.answers(nil, nil)
	w.clock.Step(10 * time.Minute)
	r.looks()
	require.Equal(t, w.stored(), r.present())
}

func TestTheAgentsDelayIsHonoured(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	w.clock.Step(lifetime / 2)
	w.agent.answers(agenterrors.Throttled("slowly", time.Hour), nil)
	require.Error(t, r.round(w.ctx))
	tries := len(w.agent.served())
	w.agent.answers(nil, nil)
	w.clock.Step(59 * time.Minute)
	r.looks()
	require.Len(t, w.agent.served(), tries)
	w.clock.Step(14 * time.Minute)
	r.looks()
	require.Len(t, w.agent.served(), tries+1)
}

func TestARefusalIsToldOnceWithWhatToDo(t *testing.T) {
	const usedBefore = "used before"
	for name, test := range map[string]struct {
		refusal error
		within  int // the most attempts in 20 minutes
	}{
		usedBefore:      {agenterrors.PermissionDenied("the bootstrap certificate has been used for another key"), 2},
		"not onboarded": {agenterrors.Unauthenticated("of another onboarding"), 2},
		// These may end by themselves.
		"no issuer":       {agenterrors.CertificatesNotIssued("this agent issues no certificates"), 20},
		"no such Cluster": {agenterrors.ClusterNotFound(production), 20},
		"an older agent":  {status.Error(codes.Unimplemented, "unknown service"), 20},
	} {
		refusal := test.refusal
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			w.put(bootstrapSecret, w.agent.onboard("first"))
			r := w.replica()
			w.agent.answers(refusal, nil)
			refused := map[string]string{"purpose": "enrollment", "result": "refused"}
			before := shimtest.Metric(t, "karpenter_capi_agent_certificate_requests_total", refused)
			none := shimtest.Scraped(t, w.clock.Now())
			for range 20 {
				r.looks()
				w.clock.Step(time.Minute)
			}
			require.Greater(t, shimtest.Metric(t, "karpenter_capi_agent_certificate_requests_total", refused), before)
			if name == usedBefore {
				scrapes.Record(t, "KarpenterCapiCertificateRefused", none, shimtest.Scraped(t, w.clock.Now()))
			}
			require.Len(t, r.announced, 1)
			require.Contains(t, r.announced[0], "AgentCertificateRefused: The agent issues no client certificate with the bootstrap certificate in the "+
				"secret karpenter/karpenter-agent-bootstrap")
			require.Contains(t, r.announced[0], status.Convert(refusal).Message())
			require.Contains(t, r.announced[0], "Run `capi-agent onboard` for the Cluster team-a/production again.")
			require.Equal(t, 1, strings.Count(w.logged(), "needs attention"))
			require.ErrorContains(t, r.calls(), "capi-agent onboard")
			require.LessOrEqual(t, len(w.agent.served()), test.within, "in 20 minutes")
			if test.within > 2 {
				require.Greater(t, len(w.agent.served()), 8, "in 20 minutes")
			}

			w.agent.answers(nil, nil)
			w.put(bootstrapSecret, w.agent.onboard("second"))
			r.looks()
			r.works()
			require.Equal(t, "second", onboardingOf(w.stored()))
		})
	}
}

func TestABootstrapThatCannotBeUsedIsNamedAndNotSent(t *testing.T) {
	for name, c := range map[string]struct {
		content func(*agent) map[string][]byte
		says    string
	}{
		"ended":        {func(a *agent) map[string][]byte { return a.certified("/bootstrap/team-a/production/x", -time.Second) }, "expired at"},
		"of another":   {func(a *agent) map[string][]byte { return a.certified("/bootstrap/team-b/production/x", time.Hour) }, "team-b/production"},
		"no bootstrap": {func(a *agent) map[string][]byte { return a.certified("/cluster/team-a/production", time.Hour) }, "not a bootstrap certificate"},
		"empty":        {func(*agent) map[string][]byte { return nil }, "cannot be used"},
		"a wrong key": {func(a *agent) map[string][]byte {
			content := a.onboard("x")
			content["tls.key"] = a.onboard("x")["tls.key"]
			return content
		}, "does not match"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			w.put(bootstrapSecret, c.content(w.agent))
			r := w.replica()
			for range 3 {
				r.looks()
				w.clock.Step(time.Minute)
			}
			require.Len(t, r.announced, 1)
			require.Contains(t, r.announced[0], "AgentBootstrapInvalid: The secret karpenter/karpenter-agent-bootstrap")
			require.Contains(t, r.announced[0], c.says)
			require.Contains(t, r.announced[0], "capi-agent onboard")
			require.ErrorContains(t, r.calls(), c.says)
			require.Empty(t, w.agent.served())
		})
	}
}

func TestAnotherOnboardingIsFollowed(t *testing.T) {
	for name, before := range map[string]func(*environment){
		"while the certificate is refused": func(*environment) {},
		"after the certificate has ended":  func(w *environment) { w.clock.Step(lifetime + time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			r := w.enrolled()
			first := w.stored()
			before(w)
			w.put(bootstrapSecret, w.agent.onboard("second"))
			r.looks()
			require.Equal(t, "second", onboardingOf(w.stored()))
			require.NotEqual(t, first.PublicKey, w.stored().PublicKey)
			r.works() // although the previous connection is still open
		})
	}
}

func TestAnEndedCertificateIsToldOnce(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	w.clock.Step(lifetime + time.Minute)
	for range 3 {
		r.looks()
		w.clock.Step(time.Minute)
	}
	require.Len(t, r.announced, 1)
	require.Contains(t, r.announced[0], "AgentCertificateEnded: The shim's client certificate expired at")
	require.Contains(t, r.announced[0], "capi-agent onboard")
	require.Len(t, w.agent.served(), 1)
}

// This is a leftover of an earlier onboarding, such as from a backup.
func TestABootstrapOfAnEarlierOnboardingTakesNothingAway(t *testing.T) {
	w := newEnvironment(t)
	earlier := w.agent.onboard("earlier")
	r := w.enrolled()
	first := w.stored()
	w.put(bootstrapSecret, earlier)
	r.looks()
	require.Len(t, r.announced, 1)
	require.Equal(t, first, w.stored())
	require.NoError(t, r.calls())
	w.clock.Step(lifetime / 2)
	r.looks()
	require.Equal(t, "first", onboardingOf(w.stored()))
	require.NotEqual(t, first, w.stored(), "it is renewed all the same")
	r.works()
}

// A backup holds both secrets of an earlier onboarding whose bootstrap certificate has not expired
// yet.
func TestBothSecretsOfAnEarlierOnboardingTakeNothingAway(t *testing.T) {
	w := newEnvironment(t)
	earlier := w.agent.onboard("earlier")
	r := w.enrolled()
	w.put(bootstrapSecret, earlier)
	w.put(identitySecret, w.before("/cluster/team-a/production/earlier"))
	r.looks()
	require.Equal(t, "first", onboardingOf(r.present()))
	require.NoError(t, r.calls())
	r.looks()
	require.NoError(t, r.calls())
	r.works()
	require.Equal(t, "first", onboardingOf(r.present()))
}

func TestACertificateOfElsewhereIsUsedAndReplacedByAnOnboarding(t *testing.T) {
	w := newEnvironment(t)
	w.agent.onboard("")
	w.put(identitySecret, w.agent.certified("/cluster/team-a/production/", lifetime))
	r := w.replica()
	r.looks()
	r.works()
	w.put(bootstrapSecret, w.agent.onboard("first"))
	r.looks()
	r.works()
	require.Equal(t, "first", onboardingOf(w.stored()))
}

func TestAnIdentityThatIsLostWhileItWorksIsStoredAnew(t *testing.T) {
	for name, lose := range map[string]func(*environment){
		"emptied": func(w *environment) { w.put(identitySecret, nil) },
		"spoilt": func(w *environment) {
			w.put(identitySecret, map[string][]byte{"tls.crt": []byte("a"), "tls.key": []byte("no key at all"), "ca.crt": []byte("c")})
		},
		"replaced by one that has ended": func(w *environment) {
			w.put(identitySecret, w.agent.certified("/cluster/team-a/production/first", -time.Second))
		},
		"replaced by one of an earlier onboarding": func(w *environment) {
			w.put(identitySecret, w.before("/cluster/team-a/production/earlier"))
		},
		"replaced by one that was issued elsewhere before": func(w *environment) {
			w.put(identitySecret, w.before("/cluster/team-a/production"))
		},
		"deleted": func(w *environment) { require.NoError(w.t, w.kube.Delete(w.t.Context(), w.secret(identitySecret))) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			r := w.enrolled()
			lose(w)
			_, err := r.read(w.ctx)
			require.NoError(t, err)
			require.NoError(t, r.calls(), "what is in memory stays in force")
			require.Equal(t, "first", onboardingOf(r.present()))
			r.looks()
			require.Equal(t, "first", onboardingOf(w.stored()))
			require.Eventually(t, func() bool { return r.calls() == nil && w.stored().Equal(w.agent.seen()) }, patience, 5*time.Millisecond)
			require.Empty(t, r.announced)
			next := w.replica()
			next.looks()
			next.works()
			require.Len(t, w.agent.served(), 2)
		})
	}
}

// before returns the content of a secret with a certificate that was issued an hour ago and has not
// expired.
func (w *environment) before(path string) map[string][]byte {
	now := w.clock.Now()
	defer w.clock.SetTime(now)
	w.clock.SetTime(now.Add(-time.Hour))
	return w.agent.certified(path, lifetime)
}

// This includes a certificate that seems older than the present one because another agent or issuer
// has issued it.
func TestAnEnrollmentByAnotherReplicaIsTaken(t *testing.T) {
	for name, later := range map[string]time.Duration{
		"after an hour": time.Hour, "in the same second": 0, "by an agent whose clock is behind": -issuersSkew,
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			r := w.enrolled()
			w.clock.Step(later)
			w.put(bootstrapSecret, w.agent.onboard("second"))
			leader := w.replica()
			leader.looks()
			_, err := r.read(w.ctx)
			require.NoError(t, err)
			require.Equal(t, "second", onboardingOf(r.present()))
			r.works()
			r.looks()
			require.Len(t, w.agent.served(), 2)
		})
	}
}

// An expired certificate has no value, so a restored one cannot make it worse.
func TestAStoredCertificateIsTakenWhenThePresentOneHasEnded(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	w.agent.onboard("earlier") // the hub was restored, too
	w.put(identitySecret, w.before("/cluster/team-a/production/earlier"))
	_, err := r.read(w.ctx)
	require.NoError(t, err)
	require.Equal(t, "first", onboardingOf(r.present()))
	w.clock.Step(lifetime)
	w.put(identitySecret, w.before("/cluster/team-a/production/earlier"))
	_, err = r.read(w.ctx)
	require.NoError(t, err)
	require.Equal(t, "earlier", onboardingOf(r.present()))
	r.works()
}

// The chart's role does not allow creating secrets.
func TestNothingIsIssuedThatCannotBeStored(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	require.NoError(t, w.kube.Delete(t.Context(), w.secret(identitySecret)))
	w.disturb = func(verb string, _ client.Object, done bool) error {
		if verb == "create" && !done {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, identitySecret.Name, errors.New("no"))
		}
		return nil
	}
	require.ErrorContains(t, r.round(w.ctx), "the secret karpenter/karpenter-agent-identity does not exist, and Karpenter may not create it: "+
		"`helm upgrade` makes it again")
	for range 20 {
		_ = r.round(w.ctx)
		w.clock.Step(time.Minute)
	}
	require.Len(t, w.agent.served(), 1, "the enrollment")
	require.NoError(t, r.calls(), "what is in memory stays in force")

	w.disturb = nil
	w.put(identitySecret, nil)
	w.clock.Step(10 * time.Minute)
	r.looks()
	require.Len(t, w.agent.served(), 2)
	require.Equal(t, w.stored(), r.present())
	r.works()
}

func TestWhatTheAgentShouldNotIssueIsNotStored(t *testing.T) {
	for name, path := range map[string]string{
		"another Cluster's": "/cluster/team-b/production/first", "another onboarding's": "/cluster/team-a/production/other",
		"a bootstrap": "/bootstrap/team-a/production/first",
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			w.put(bootstrapSecret, w.agent.onboard("first"))
			w.agent.issue = func(string) string { return path }
			r := w.replica()
			require.ErrorContains(t, r.round(w.ctx), "the agent has issued a certificate")
			require.True(t, stored{secret: w.secret(identitySecret)}.empty())
		})
	}
}

func TestTwoLeadersUseOneKey(t *testing.T) {
	w := newEnvironment(t)
	w.put(bootstrapSecret, w.agent.onboard("first"))
	replicas := []*replica{w.replica(), w.replica(), w.replica()}
	var leading sync.WaitGroup
	for _, r := range replicas {
		leading.Go(func() { assert.NoError(t, r.round(w.ctx)) })
	}
	leading.Wait()
	keys := map[string]bool{}
	for _, r := range w.agent.served() {
		keys[r.key] = true
	}
	require.Len(t, keys, 1)
	for _, r := range replicas {
		require.Empty(t, r.announced)
		r.looks()
		require.Equal(t, w.stored(), r.present())
		r.works()
	}
}

// Another replica is faster, by either of the two writes.
func TestAConflictIsNoFailure(t *testing.T) {
	for _, verb := range []string{"create", "update"} {
		t.Run(verb, func(t *testing.T) {
			w := newEnvironment(t)
			w.put(bootstrapSecret, w.agent.onboard("first"))
			slow, fast := w.replica(), w.replica()
			once := false
			w.disturb = func(called string, _ client.Object, done bool) error {
				if called == verb && !done && !once {
					once = true
					return fast.round(w.ctx)
				}
				return nil
			}
			slow.looks()
			require.True(t, once)
			require.Equal(t, fast.present(), slow.present())
			require.Equal(t, w.stored(), slow.present())
			keys := map[string]bool{}
			for _, r := range w.agent.served() {
				keys[r.key] = true
			}
			require.Len(t, keys, 1)
		})
	}
}

func TestOnlyTheLeaderRequestsCertificatesAndAllReadThem(t *testing.T) {
	w := newEnvironment(t)
	w.put(bootstrapSecret, w.agent.onboard("first"))
	follower, leader := w.replica(), w.replica()
	require.False(t, follower.Follow().NeedLeaderElection())
	require.True(t, leader.NeedLeaderElection())
	ctx, cancel := context.WithCancel(w.ctx)
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(t, follower.Follow().Start(ctx)) })
	require.Eventually(t, w.clock.HasWaiters, patience, time.Millisecond)
	require.Empty(t, w.agent.served())

	running.Go(func() { assert.NoError(t, leader.Start(ctx)) })
	require.Eventually(t, func() bool { return len(w.agent.served()) == 1 && leader.present() != nil }, patience, time.Millisecond)
	require.Eventually(t, func() bool {
		w.clock.Step(interval)
		return follower.present() != nil
	}, patience, 10*time.Millisecond)
	follower.works()
	cancel()
	running.Wait()
}

func TestRenewalsFailNoCall(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	var calling sync.WaitGroup
	var calls [4]atomic.Int64
	for i := range calls {
		calling.Go(func() {
			for ctx.Err() == nil {
				if err := r.calls(); !assert.NoError(t, err) {
					return
				}
				calls[i].Add(1)
			}
		})
	}
	for range 5 { // so that the first certificates have long expired
		w.clock.Step(lifetime / 2)
		r.looks()
		stored := w.stored()
		require.Eventually(t, func() bool { return t.Failed() || stored.Equal(w.agent.seen()) }, patience, time.Millisecond)
		for i := range calls { // no call lasts for half a lifetime
			before := calls[i].Load()
			require.Eventually(t, func() bool { return t.Failed() || calls[i].Load() >= before+2 }, patience, time.Millisecond)
		}
	}
	cancel()
	calling.Wait()
}

func TestAnUnreadableSpokeLeavesTheCertificateInForce(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	w.disturb = func(string, client.Object, bool) error { return errors.New("no API server") }
	require.ErrorContains(t, r.round(w.ctx), "no API server")
	for range 3 {
		_, err := r.read(w.ctx)
		r.logUnread(w.ctx, err)
	}
	require.Equal(t, 1, strings.Count(w.logged(), "stays in use"))
	require.NoError(t, r.calls())
	w.disturb = nil
	_, err := r.read(w.ctx)
	r.logUnread(w.ctx, err)
	require.Contains(t, w.logged(), "can be read again")
}

func TestObtainWaitsForTheFirstCertificate(t *testing.T) {
	w := newEnvironment(t)
	r := w.replica()
	obtained := make(chan error, 1)
	go func() { obtained <- r.Obtain(w.ctx) }()
	require.Eventually(t, w.clock.HasWaiters, patience, time.Millisecond)
	w.put(bootstrapSecret, w.agent.onboard("first"))
	require.Eventually(t, func() bool {
		w.clock.Step(interval)
		return len(obtained) == 1
	}, patience, 10*time.Millisecond)
	require.NoError(t, <-obtained)
	r.works()
	require.Equal(t, w.stored(), r.present())

	t.Log("another process takes it from the secret")
	next := w.replica()
	require.NoError(t, next.Obtain(w.ctx))
	next.works()
	require.Len(t, w.agent.served(), 1)
}

func TestObtainReturnsWhatItWasWaitingFor(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*environment)
		says    string
	}{
		"no bootstrap": {func(*environment) {}, "waiting for the secret karpenter/karpenter-agent-bootstrap, which `capi-agent onboard` writes"},
		"no agent": {func(w *environment) {
			w.put(bootstrapSecret, w.agent.onboard("first"))
			w.agent.answers(lost, nil)
		}, "lost"},
		"no API server": {func(w *environment) {
			w.disturb = func(string, client.Object, bool) error { return errors.New("no API server") }
		}, "no API server"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			c.prepare(w)
			ctx, cancel := context.WithCancel(w.ctx)
			obtained := make(chan error, 1)
			r := w.replica()
			go func() { obtained <- r.Obtain(ctx) }()
			require.Eventually(t, w.clock.HasWaiters, patience, time.Millisecond)
			cancel()
			require.ErrorContains(t, <-obtained, c.says)
		})
	}
}

func TestObtainDoesNotWaitForWhatAPersonHasToDo(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*environment)
		says    string
	}{
		"refused": {func(w *environment) {
			w.put(bootstrapSecret, w.agent.onboard("first"))
			w.agent.answers(agenterrors.PermissionDenied("used for another key"), nil)
		}, "used for another key"},
		"a bootstrap that has ended": {func(w *environment) {
			w.put(bootstrapSecret, w.agent.certified("/bootstrap/team-a/production/x", -time.Second))
		}, "expired at"},
		"a certificate that has ended": {func(w *environment) {
			w.put(identitySecret, w.agent.certified("/cluster/team-a/production/x", -time.Second))
		}, "expired at"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t)
			c.prepare(w)
			err := w.replica().Obtain(w.ctx)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, "Run `capi-agent onboard` for the Cluster team-a/production again.")
		})
	}
}

func TestObtainIsContentWithACertificateThatCannotBeRenewed(t *testing.T) {
	w := newEnvironment(t)
	w.enrolled()
	w.clock.Step(lifetime / 2)
	w.agent.answers(lost, nil)
	r := w.replica()
	require.NoError(t, r.Obtain(w.ctx))
	r.works()
}

func TestRequestsAreCounted(t *testing.T) {
	newEnvironment(t).enrolled()
	families, err := crmetrics.Registry.Gather()
	require.NoError(t, err)
	var found bool
	for _, family := range families {
		found = found || family.GetName() == "karpenter_capi_agent_certificate_requests_total"
	}
	require.True(t, found)
	problems, err := testutil.GatherAndLint(crmetrics.Registry, "karpenter_capi_agent_certificate_requests_total")
	require.NoError(t, err)
	require.Empty(t, problems)
}
