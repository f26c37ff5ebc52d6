package agent_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	addonsv1 "sigs.k8s.io/cluster-api/api/addons/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	kubeclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/onboarding"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// onboarded is a hub with a Cluster and two agents that issue certificates.
type onboarded struct {
	*testing.T

	agents []*running
	// metrics are those of the agents.
	metrics   []*prometheus.Registry
	authority *testpki.Authority
	// issuer is the authority's own certificate and key, with which all agents sign. own are the
	// files about each agent's own certificate that it uses when it issues certificates.
	issuer  testpki.Files
	own     []testpki.Files
	cluster types.NamespacedName
	options onboarding.Options
}

func newOnboarded(t *testing.T) *onboarded {
	t.Helper()
	namespace := plane.Namespace(t)
	o := &onboarded{T: t, cluster: types.NamespacedName{Namespace: namespace, Name: "spoke"}}
	plane.Create(t, capitest.NewCluster(namespace, "spoke"))
	authority := testpki.New(t)
	o.authority = authority
	o.issuer.CertFile, o.issuer.KeyFile = authority.Write(t, t.TempDir())
	read := func(name string) []byte {
		content, err := os.ReadFile(name)
		require.NoError(t, err)
		return content
	}
	plane.Create(t, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "issuer"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: read(o.issuer.CertFile), corev1.TLSPrivateKeyKey: read(o.issuer.KeyFile)},
	})
	o.options = onboarding.Options{
		Cluster: o.cluster, Issuer: types.NamespacedName{Namespace: namespace, Name: "issuer"}, TrustDomain: "karpenter-capi",
		ValidFor: time.Hour, Secret: types.NamespacedName{Namespace: "karpenter", Name: "bootstrap"},
	}
	for range 2 {
		settings := testOptions(namespace)
		own := authority.Issue(t, t.TempDir(), authority)
		settings.ClientCAFile, settings.TLSCertFile = own.CAFile, own.CertFile
		settings.IssuerCertFile, settings.IssuerKeyFile = o.issuer.CertFile, o.issuer.KeyFile
		o.own = append(o.own, own)
		o.metrics = append(o.metrics, prometheus.NewRegistry())
		o.agents = append(o.agents, startFor(t, authority, agent.Config{Options: settings, Registerer: lo.LastOrEmpty(o.metrics)}))
	}
	return o
}

// onboard does what the command does, and returns the secret for the spoke.
func (o *onboarded) onboard(again bool) *corev1.Secret {
	o.Helper()
	o.options.Again = again
	prepared := o.prepare()
	require.NoError(o, prepared.Begin(o.Context(), plane.Client))
	return prepared.Secret
}

// as connects to an agent with a certificate.
func (o *onboarded) as(agent int, certificate, key, ca []byte) *client.Client {
	o.Helper()
	folder := o.TempDir()
	file := func(name string, content []byte) string {
		path := filepath.Join(folder, name)
		require.NoError(o, os.WriteFile(path, content, 0o600))
		return path
	}
	c, err := client.New(client.Options{Address: o.agents[agent].address, Timeout: patience, TLS: &client.TLS{
		CertFile: file("tls.crt", certificate), KeyFile: file("tls.key", key), CAFile: file("ca.crt", ca),
	}})
	require.NoError(o, err)
	o.Cleanup(func() { require.NoError(o, c.Close()) })
	return c
}

func (o *onboarded) with(agent int, secret *corev1.Secret) *client.Client {
	o.Helper()
	return o.as(agent, secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey], secret.Data[onboarding.CAKey])
}

func (o *onboarded) key() *ecdsa.PrivateKey {
	o.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(o, err)
	return key
}

// issue requests a certificate for a key.
func (o *onboarded) issue(by *client.Client, key crypto.Signer) (*agentv1alpha1.IssueCertificateResponse, error) {
	o.Helper()
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(o, err)
	return agentv1alpha1.NewCertificateServiceClient(by.Conn()).IssueCertificate(o.Context(), &agentv1alpha1.IssueCertificateRequest{
		Cluster: o.ref(), SigningRequest: request,
	})
}

func (o *onboarded) ref() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: o.cluster.Namespace, Name: o.cluster.Name}
}

// issued connects with a certificate that was issued for a key.
func (o *onboarded) issued(agent int, response *agentv1alpha1.IssueCertificateResponse, key *ecdsa.PrivateKey) *client.Client {
	o.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(o, err)
	return o.as(agent, response.GetCertificateChain(), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), response.GetServerAuthorities())
}

// enrolled onboards the Cluster, and connects to both agents like its shim.
func (o *onboarded) enrolled(again bool) []*client.Client {
	o.Helper()
	key := o.key()
	response, err := o.issue(o.with(0, o.onboard(again)), key)
	require.NoError(o, err)
	shims := []*client.Client{o.issued(0, response, key), o.issued(1, response, key)}
	for _, shim := range shims {
		o.serves(shim)
	}
	return shims
}

// serves waits until an agent, whose cache may lag, accepts the caller.
func (o *onboarded) serves(by *client.Client) {
	o.Helper()
	eventually(o.T, "the caller is served", func(context.Context) (bool, error) {
		err := o.list(by)
		if agenterrors.IsUnauthenticated(err) {
			return false, nil
		}
		return err == nil, err
	})
}

func (o *onboarded) list(by *client.Client) error {
	_, err := by.NodeGroups.ListNodeGroups(o.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: o.ref()})
	return err
}

// refuses waits until an agent, whose cache may lag, rejects the caller.
func (o *onboarded) refuses(by *client.Client, says string) {
	o.Helper()
	eventually(o.T, "the caller is refused", func(context.Context) (bool, error) {
		err := o.list(by)
		return agenterrors.IsUnauthenticated(err) && assertSays(err, says), nil
	})
}

func assertSays(err error, text string) bool {
	return err != nil && strings.Contains(err.Error(), text)
}

func TestABootstrapCertificateServesOneKey(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	secret := o.onboard(false)
	first, second := o.with(0, secret), o.with(1, secret)
	key := o.key()
	response, err := o.issue(first, key)
	require.NoError(t, err)
	// The response may have been lost, and the shim may ask the other agent.
	_, err = o.issue(second, key)
	require.NoError(t, err)
	for _, by := range []*client.Client{first, second} {
		_, err = o.issue(by, o.key())
		require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
		require.ErrorContains(t, err, "has been used for another key")
		require.True(t, agenterrors.IsPermissionDenied(o.list(by)), "it is good for nothing else")
	}

	shim := o.issued(1, response, key)
	o.serves(shim)
	renewed := o.key()
	response, err = o.issue(shim, renewed)
	require.NoError(t, err)
	o.serves(o.issued(0, response, renewed))
	require.Greater(t, time.Until(response.GetRenewAt().AsTime()), 20*time.Minute, "the test's authority lives for an hour")
}

// The Spoke records the key, and the certificate is valid for longer than it takes to delete a
// Spoke.
func TestABootstrapCertificateServesNoOtherKeyOnceItsSpokeIsGone(t *testing.T) {
	o := newOnboarded(t)
	o.onboard(false)
	secret := o.onboard(true)
	key := o.key()
	response, err := o.issue(o.with(0, secret), key)
	require.NoError(t, err)
	shim := o.issued(0, response, key)
	o.serves(shim)
	var spoke v1alpha1.Spoke
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &spoke))
	require.NoError(t, plane.Client.Delete(t.Context(), &spoke))
	for agent := range o.agents {
		_, err = o.issue(o.with(agent, secret), o.key())
		require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
		require.ErrorContains(t, err, "does not expect this bootstrap certificate")
	}

	// The shim's next synchronization makes a Spoke.
	list, err := shim.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: o.ref(), Holder: "karpenter"})
	require.NoError(t, err)
	_, err = shim.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{Cluster: o.ref(), Holder: "karpenter", Token: list.GetToken()})
	require.NoError(t, err)
	var again v1alpha1.Spoke
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &again))
	require.NotEqual(t, spoke.UID, again.UID)
	_, err = o.issue(o.with(0, secret), o.key())
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	_, err = o.issue(shim, o.key())
	require.NoError(t, err, "a renewal does not depend on the Spoke")

	secret = o.onboard(true)
	_, err = o.issue(o.with(0, secret), o.key())
	require.NoError(t, err, "another onboarding is recorded again")
}

// A move deletes the Spoke, and makes it again with its metadata and spec.
func TestABootstrapCertificateServesTheSameKeyAfterAMove(t *testing.T) {
	for name, used := range map[string]bool{"that was used": true, "that was not used": false} {
		t.Run(name, func(t *testing.T) {
			o := newOnboarded(t)
			secret, key := o.onboard(false), o.key()
			if used {
				_, err := o.issue(o.with(0, secret), key)
				require.NoError(t, err)
			}
			var spoke v1alpha1.Spoke
			require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &spoke))
			require.NoError(t, plane.Client.Delete(t.Context(), &spoke))
			spoke.ObjectMeta = metav1.ObjectMeta{Namespace: spoke.Namespace, Name: spoke.Name, Labels: spoke.Labels}
			spoke.Status = v1alpha1.SpokeStatus{}
			plane.Create(t, &spoke)
			_, err := o.issue(o.with(1, secret), key)
			require.NoError(t, err)
			_, err = o.issue(o.with(0, secret), o.key())
			require.ErrorContains(t, err, "has been used for another key")
		})
	}
}

// A Cluster may be onboarded long before its spoke exists, so that nothing is silent yet.
func TestASpokeThatHasNeverCalledIsSilentOnceItHasACertificate(t *testing.T) {
	o := newOnboarded(t)
	prepared := o.dispatched(false)
	now := clocktesting.NewFakeClock(time.Now())
	keeper := spokes.New(spokes.Config{
		Client: plane.Client, Namespaces: []string{o.cluster.Namespace}, Clock: now, Serves: func(types.NamespacedName) bool { return true },
	})
	registry := prometheus.NewRegistry()
	registry.MustRegister(keeper.Collector())
	shows := func(series int, why string) {
		t.Helper()
		require.NoError(t, keeper.Look(t.Context()))
		n, err := testutil.GatherAndCount(registry, "capi_agent_spoke_connected")
		require.NoError(t, err)
		require.Equal(t, series, n, why)
	}
	now.Step(time.Hour)
	shows(0, "the spoke may not exist yet")
	require.NoError(t, keeper.Enroll(t.Context(), o.cluster, prepared.ID, strings.Repeat("a", 64)))
	shows(0, "it has just got its certificate")
	now.Step(16 * time.Minute)
	shows(1, "it should have called by now")
	status, known := keeper.Status(o.cluster)
	require.True(t, known)
	require.True(t, meta.IsStatusConditionFalse(status.Conditions, v1alpha1.ConnectedCondition))
}

func TestCertificatesThatAreIssuedAndRefusedAreEventsAndCounted(t *testing.T) {
	o := newOnboarded(t)
	secret, key, renewed := o.onboard(false), o.key(), o.key()
	response, err := o.issue(o.with(0, secret), key)
	require.NoError(t, err)
	first := scraped(t, o.metrics[0], time.Now())
	_, err = o.issue(o.with(0, secret), o.key())
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	scrapes.Record(t, "CapiAgentBootstrapCertificateReused", first, scraped(t, o.metrics[0], time.Now()))
	_, err = o.issue(o.issued(0, response, key), renewed)
	require.NoError(t, err)
	var spoke v1alpha1.Spoke
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &spoke))
	require.NoError(t, plane.Client.Delete(t.Context(), &spoke))
	_, err = o.issue(o.with(0, secret), o.key())
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)

	counted := map[string]int{}
	families, err := o.metrics[0].Gather()
	require.NoError(t, err)
	for _, family := range families {
		if family.GetName() != "capi_agent_certificate_requests_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			counted[labels["purpose"]+" "+labels["result"]] = int(metric.GetCounter().GetValue())
		}
	}
	require.Equal(t, map[string]int{
		"enrollment issued": 1, "enrollment second-key": 1, "enrollment refused": 1, "enrollment failed": 0,
		"renewal issued": 1, "renewal second-key": 0, "renewal refused": 0, "renewal failed": 0,
	}, counted)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var events eventsv1.EventList
		if !assert.NoError(c, plane.Client.List(t.Context(), &events, kubeclient.InNamespace(o.cluster.Namespace))) {
			return
		}
		of := map[string]string{}
		for _, event := range events.Items {
			if event.Regarding.Kind == "Spoke" && event.Regarding.UID == spoke.UID {
				of[event.Reason] = event.Type
			}
		}
		assert.Equal(c, map[string]string{"CertificateIssued": corev1.EventTypeNormal, "BootstrapCertificateReused": corev1.EventTypeWarning}, of)
	}, soon, 50*time.Millisecond)
}

// This holds however many keys race for it, with both agents.
func TestABootstrapCertificateServesOneOfManyKeysAtOnce(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	secret := o.onboard(false)
	by := []*client.Client{o.with(0, secret), o.with(1, secret)}
	var (
		running sync.WaitGroup
		mu      sync.Mutex
		served  int
	)
	for i := range 12 {
		key := o.key()
		running.Go(func() {
			request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
			if err == nil {
				_, err = agentv1alpha1.NewCertificateServiceClient(by[i%2].Conn()).IssueCertificate(o.Context(), &agentv1alpha1.IssueCertificateRequest{
					Cluster: o.ref(), SigningRequest: request,
				})
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				served++
			} else if !agenterrors.IsPermissionDenied(err) {
				t.Errorf("neither served nor refused: %v", err)
			}
		})
	}
	running.Wait()
	require.Equal(t, 1, served)
}

func TestAnotherOnboardingEndsTheOneBefore(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	// This certificate is from an authority without onboardings.
	before := o.agents[0].client(o.cluster.Namespace, o.cluster.Name)
	require.NoError(t, o.list(before))
	first := o.enrolled(false)
	require.NoError(t, o.list(first[0]))
	require.NoError(t, o.list(first[1]))
	o.refuses(before, "does not belong to an onboarding")
	stream, err := first[0].Claims.WatchClaims(t.Context(), &agentv1alpha1.WatchClaimsRequest{Cluster: o.ref()})
	require.NoError(t, err)

	_, err = onboarding.Prepare(t.Context(), plane.Client, o.withoutAgain(), clock.RealClock{})
	require.ErrorContains(t, err, "is already onboarded; --again")
	second := o.enrolled(true)
	require.NoError(t, o.list(second[0]))
	o.refuses(first[0], "does not belong to the Cluster's current onboarding")
	o.refuses(first[1], "does not belong to the Cluster's current onboarding")
	_, err = o.issue(first[1], o.key())
	require.True(t, agenterrors.IsUnauthenticated(err), "%v", err)
	require.True(t, agenterrors.IsUnauthenticated(drain(stream)), "streams end as well")
}

// A certificate of an ended onboarding does not use up the limits of the current one.
func TestAnEndedCertificateTakesNothingFromThePresentOne(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	key := o.key()
	first, err := o.issue(o.with(0, o.onboard(false)), key)
	require.NoError(t, err)
	second := o.enrolled(true)
	o.refuses(o.issued(0, first, key), "does not belong to the Cluster's current onboarding")
	for range limits.ConnectionsOfCaller - 1 {
		require.True(t, agenterrors.IsUnauthenticated(o.list(o.issued(0, first, key))))
	}
	require.Error(t, o.list(o.issued(0, first, key)), "one more is refused")
	require.NoError(t, o.list(second[0]))
	fresh := o.key()
	renewed, err := o.issue(second[0], fresh)
	require.NoError(t, err)
	require.NoError(t, o.list(o.issued(0, renewed, fresh)), "nor is a new connection")
}

// A policy's grant to a Cluster's identity for another Cluster ends with the onboarding of the
// former, even if the agent does not serve it.
func TestAGrantForAnotherClusterNeedsThePresentOnboarding(t *testing.T) {
	t.Parallel()
	namespace := plane.Namespace(t)
	own := capitest.NewCluster(namespace, "own")
	own.Labels = map[string]string{v1alpha1.OnboardingLabel: "abc"}
	plane.Create(t, own, capitest.NewCluster(namespace, "other"))
	policy, err := authz.ParsePolicy(fmt.Appendf(nil, `
identities:
- {id: "spiffe://karpenter-capi/cluster/%[1]s/own", roles: [reader], clusters: ["%[1]s/other"]}
- {id: "spiffe://karpenter-capi/cluster/elsewhere/mgmt", roles: [reader], clusters: ["%[1]s/other"]}
`, namespace), "karpenter-capi")
	require.NoError(t, err)
	a := start(t, agent.Config{Options: testOptions(namespace), Policy: func() *authz.Policy { return policy }})
	list := func(uri string) error {
		_, err := a.as("spiffe://karpenter-capi/cluster/"+uri).NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "other"},
		})
		return err
	}
	require.NoError(t, list(namespace+"/own/abc"))
	require.True(t, agenterrors.IsUnauthenticated(list(namespace+"/own/def")))
	require.NoError(t, list("elsewhere/mgmt"), "as before there were onboardings")
	require.True(t, agenterrors.IsUnauthenticated(list("elsewhere/mgmt/abc")), "this agent cannot check that onboarding")
	require.NoError(t, plane.Client.Delete(t.Context(), own))
	eventually(t, "the onboarding ends with its Cluster", func(context.Context) (bool, error) {
		return agenterrors.IsUnauthenticated(list(namespace + "/own/abc")), nil
	})
}

// A move would leave behind what records that the bootstrap certificate was used.
func TestABootstrapWaitsWhileTheClusterIsPaused(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	by, key := o.with(0, o.onboard(false)), o.key()
	pause := func(paused bool) {
		cluster := &clusterv1.Cluster{}
		require.NoError(t, plane.Client.Get(t.Context(), o.cluster, cluster))
		cluster.Spec.Paused = &paused
		require.NoError(t, plane.Client.Update(t.Context(), cluster))
	}
	pause(true)
	_, err := o.issue(by, key)
	require.True(t, agenterrors.IsUnavailable(err), "%v", err)
	pause(false)
	response, err := o.issue(by, key)
	require.NoError(t, err)
	o.serves(o.issued(0, response, key))
}

// An onboarding that has ended meanwhile does not replace the current one.
func TestAnEarlierOnboardingDoesNotEnroll(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	keeper := spokes.New(spokes.Config{
		Client: plane.Client, Clock: clocktesting.NewFakeClock(time.Now()), Serves: func(types.NamespacedName) bool { return true },
	})
	key := func(of string) string { return strings.Repeat(of, 64) }
	before := o.dispatched(false)
	require.NoError(t, keeper.Enroll(t.Context(), o.cluster, before.ID, key("a")))
	present := o.dispatched(true)
	require.ErrorIs(t, keeper.Enroll(t.Context(), o.cluster, before.ID, key("a")), spokes.ErrEnded)
	require.NoError(t, keeper.Enroll(t.Context(), o.cluster, present.ID, key("b")))
	require.ErrorIs(t, keeper.Enroll(t.Context(), o.cluster, before.ID, key("a")), spokes.ErrEnded)
	require.ErrorIs(t, keeper.Enroll(t.Context(), o.cluster, present.ID, key("c")), spokes.ErrOtherKey)
	require.NoError(t, keeper.Enroll(t.Context(), o.cluster, present.ID, key("b")))
}

// Cluster API writes a Cluster's status while the Cluster is being created. A concurrent onboarding
// is still detected.
func TestAnOnboardingIsNotDisturbedByTheClustersStatus(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	first, second := o.prepare(), o.prepare()
	var cluster clusterv1.Cluster
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &cluster))
	before := cluster.DeepCopy()
	cluster.Annotations = map[string]string{"changed-by": "another-writer"}
	require.NoError(t, plane.Client.Patch(t.Context(), &cluster, kubeclient.MergeFrom(before)))
	require.NoError(t, first.Begin(t.Context(), plane.Client))
	require.ErrorContains(t, second.Begin(t.Context(), plane.Client), "another onboarding has begun meanwhile")
	_, err := o.issue(o.with(0, first.Secret), o.key())
	require.NoError(t, err, "the one that began is not disturbed")
}

func (o *onboarded) withoutAgain() onboarding.Options {
	options := o.options
	options.Again = false
	return options
}

// drain reads a stream to its end.
func drain[T any](stream interface{ Recv() (T, error) }) error {
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

// Certificates of a Cluster are not valid for a Cluster that is recreated under its name.
func TestAClusterThatIsMadeAgainObeysNoOldKey(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	shim := o.enrolled(false)
	require.NoError(t, o.list(shim[0]))
	var cluster clusterv1.Cluster
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &cluster))
	require.NoError(t, plane.Client.Delete(t.Context(), &cluster))
	plane.Create(t, capitest.NewCluster(o.cluster.Namespace, o.cluster.Name))
	o.refuses(shim[0], "does not belong to the Cluster's current onboarding")
	o.refuses(shim[1], "does not belong to the Cluster's current onboarding")
	_, err := o.issue(shim[0], o.key())
	require.True(t, agenterrors.IsUnauthenticated(err), "%v", err)
}

func TestOffboardingEndsEveryKeyOfTheCluster(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	elsewhere := o.agents[0].client(o.cluster.Namespace, o.cluster.Name)
	shim := o.enrolled(false)
	require.NoError(t, o.list(shim[0]))
	was, err := onboarding.Offboard(t.Context(), plane.Client, o.cluster, true)
	require.NoError(t, err)
	require.True(t, was)
	require.NoError(t, o.list(shim[0]), "a dry run does nothing")
	was, err = onboarding.Offboard(t.Context(), plane.Client, o.cluster, false)
	require.NoError(t, err)
	require.True(t, was)
	o.refuses(shim[0], "does not belong to the Cluster's current onboarding")
	o.refuses(elsewhere, "does not belong to an onboarding")
	require.True(t, apierrors.IsNotFound(plane.Client.Get(t.Context(), o.cluster, &v1alpha1.Spoke{})))
	was, err = onboarding.Offboard(t.Context(), plane.Client, o.cluster, false)
	require.NoError(t, err)
	require.False(t, was)
	require.NoError(t, o.list(o.enrolled(false)[0]), "it can be onboarded again, and that takes no --again")
}

// Whichever way an onboarding ends, the shim's open streams end too, at both agents.
func TestOpenStreamsEndWithTheOnboarding(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, o *onboarded, cluster *clusterv1.Cluster){
		"the spoke is offboarded": func(t *testing.T, o *onboarded, _ *clusterv1.Cluster) {
			t.Helper()
			_, err := onboarding.Offboard(t.Context(), plane.Client, o.cluster, false)
			require.NoError(t, err)
		},
		"the label is removed": func(t *testing.T, _ *onboarded, cluster *clusterv1.Cluster) {
			t.Helper()
			before := cluster.DeepCopy()
			delete(cluster.Labels, v1alpha1.OnboardingLabel)
			require.NoError(t, plane.Client.Patch(t.Context(), cluster, kubeclient.MergeFrom(before)))
		},
		"the Cluster is deleted": func(t *testing.T, _ *onboarded, cluster *clusterv1.Cluster) {
			t.Helper()
			require.NoError(t, plane.Client.Delete(t.Context(), cluster))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOnboarded(t)
			shim := o.enrolled(false)
			var streams []interface {
				Recv() (*agentv1alpha1.WatchClaimsResponse, error)
			}
			for _, by := range shim {
				stream, err := by.Claims.WatchClaims(t.Context(), &agentv1alpha1.WatchClaimsRequest{Cluster: o.ref()})
				require.NoError(t, err)
				_, err = stream.Recv()
				require.NoError(t, err)
				streams = append(streams, stream)
			}
			var cluster clusterv1.Cluster
			require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &cluster))
			end(t, o, &cluster)
			ended := time.Now()
			for _, stream := range streams {
				err := drain(stream)
				require.True(t, agenterrors.IsUnauthenticated(err), "%v", err)
				require.Less(t, time.Since(ended), soon)
			}
			for i := range streams {
				require.Error(t, o.list(shim[i]), "nor is a new call answered")
				_, err := o.issue(shim[i], o.key())
				require.Error(t, err, "nor is the certificate renewed")
			}
		})
	}
}

func TestASpokeShowsItsShim(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	shim := o.enrolled(false)
	sync := func(agent int) {
		list, err := shim[agent].Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: o.ref(), Holder: "karpenter"})
		require.NoError(t, err)
		_, err = shim[agent].Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: o.ref(), Holder: "karpenter", Token: list.GetToken(), SpokeId: "kube-system-uid",
		})
		require.NoError(t, err)
	}
	sync(0)
	var spoke v1alpha1.Spoke
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &spoke))
	require.True(t, meta.IsStatusConditionTrue(spoke.Status.Conditions, v1alpha1.ConnectedCondition))
	require.Equal(t, "kube-system-uid", spoke.Status.SpokeID)
	require.NotEmpty(t, spoke.Status.ShimVersion)
	require.Equal(t, "devel", spoke.Status.AgentVersion)
	require.Equal(t, "capi.agent.v1alpha1", spoke.Status.APIVersion)
	require.NotEmpty(t, spoke.Status.Certificate.Serial)
	require.Positive(t, time.Until(spoke.Status.Certificate.NotAfter.Time))
	require.Positive(t, time.Since(spoke.Status.Certificate.NotBefore.Time))
	require.NotEmpty(t, spoke.Spec.Enrollment.PublicKey)
	require.Len(t, spoke.OwnerReferences, 1, "it goes with its Cluster")

	written := spoke.ResourceVersion
	sync(0)
	sync(1)
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &spoke))
	require.Equal(t, written, spoke.ResourceVersion, "what is no news is not written, by neither agent")
	var list v1alpha1.SpokeList
	require.NoError(t, plane.Client.List(t.Context(), &list, kubeclient.InNamespace(o.cluster.Namespace)))
	require.Len(t, list.Items, 1)
}

// A shim with the certificate of one cluster and the kubeconfig of another sends a set in which no
// claim of this Cluster is.
func TestOneClusterIsAClustersSpokeUntilAnotherIsOnboarded(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	sync := func(shim *client.Client, spoke string) error {
		list, err := shim.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: o.ref(), Holder: "karpenter"})
		require.NoError(t, err)
		_, err = shim.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: o.ref(), Holder: "karpenter", Token: list.GetToken(), SpokeId: spoke,
		})
		return err
	}
	recorded := func() string {
		var spoke v1alpha1.Spoke
		require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &spoke))
		return spoke.Status.SpokeID
	}
	create := func(shim *client.Client, spoke string) error {
		_, err := shim.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: o.ref(), ClaimId: "a-claim", Holder: "karpenter", SpokeId: spoke, Candidates: []string{o.cluster.Namespace + "/workers"},
		})
		return err
	}
	plane.Create(t, capitest.NewMachineDeployment(o.cluster.Namespace, "workers", o.cluster.Name, 0))
	shim := o.enrolled(false)
	require.NoError(t, sync(shim[0], "first"))
	for _, agent := range shim { // the other one has not looked at the Spokes since
		err := sync(agent, "second")
		require.True(t, agenterrors.IsSpokeMismatch(err), "%v", err)
		require.ErrorContains(t, err, "delete the Cluster's Spoke, or onboard the cluster again")
		err = create(agent, "second")
		require.True(t, agenterrors.IsSpokeMismatch(err), "%v", err)
		require.Equal(t, "first", recorded())
		require.NoError(t, sync(agent, "first"))
		require.NoError(t, sync(agent, ""))
		require.Equal(t, "first", recorded())
	}

	shim = o.enrolled(true)
	require.Empty(t, recorded())
	require.NoError(t, sync(shim[1], "second"))
	require.Equal(t, "second", recorded())
	err := sync(shim[0], "first")
	require.True(t, agenterrors.IsSpokeMismatch(err), "%v", err)
}

// The certificate that the shim uses is revoked, though the Cluster has no onboarding.
func TestTheFirstOnboardingOfAConnectedShimIsKnown(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	require.False(t, o.prepare().Connected)
	spoke := &v1alpha1.Spoke{ObjectMeta: metav1.ObjectMeta{Namespace: o.cluster.Namespace, Name: o.cluster.Name}}
	plane.Create(t, spoke)
	meta.SetStatusCondition(&spoke.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConnectedCondition, Status: metav1.ConditionTrue, Reason: "Synchronized",
	})
	require.NoError(t, plane.Client.Status().Update(t.Context(), spoke))
	require.True(t, o.prepare().Connected)
}

func TestUninstallTakesOnboardingsOff(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	o.enrolled(false)
	prepared := o.dispatched(true)
	for _, a := range o.agents {
		a.stop()
	}
	how := claims.UninstallOptions{Report: func(string, ...any) {}}
	require.NoError(t, agent.Uninstall(t.Context(), plane.Config, testOptions(o.cluster.Namespace), how))
	var cluster clusterv1.Cluster
	require.NoError(t, plane.Client.Get(t.Context(), o.cluster, &cluster))
	require.NotContains(t, cluster.Labels, v1alpha1.OnboardingLabel)
	require.True(t, apierrors.IsNotFound(plane.Client.Get(t.Context(), o.cluster, &v1alpha1.Spoke{})))
	require.Empty(t, o.sets(), "of the onboarding %s", prepared.ID)
}

// prepare prepares an onboarding of the Cluster.
func (o *onboarded) prepare() *onboarding.Onboarding {
	o.Helper()
	prepared, err := onboarding.Prepare(o.Context(), plane.Client, o.options, clock.RealClock{})
	require.NoError(o, err)
	return prepared
}

// dispatched onboards the Cluster with a ClusterResourceSet.
func (o *onboarded) dispatched(again bool) *onboarding.Onboarding {
	o.Helper()
	o.options.Again = again
	prepared := o.prepare()
	require.NoError(o, prepared.Dispatch(o.Context(), plane.Client, true))
	require.NoError(o, prepared.Dispatch(o.Context(), plane.Client, false))
	require.NoError(o, prepared.Begin(o.Context(), plane.Client))
	require.NoError(o, prepared.Recall(o.Context(), plane.Client))
	return prepared
}

func (o *onboarded) sets() []addonsv1.ClusterResourceSet {
	o.Helper()
	var sets addonsv1.ClusterResourceSetList
	require.NoError(o, plane.Client.List(o.Context(), &sets, kubeclient.InNamespace(o.cluster.Namespace)))
	return sets.Items
}

func TestAClusterResourceSetIsForOneOnboardingOfOneCluster(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	first := o.dispatched(false)
	strategies := map[string]string{}
	for _, set := range o.sets() {
		require.Equal(t, map[string]string{v1alpha1.OnboardingLabel: first.ID}, set.Spec.ClusterSelector.MatchLabels)
		var secret corev1.Secret
		require.NoError(t, plane.Client.Get(t.Context(), kubeclient.ObjectKeyFromObject(&set), &secret))
		require.EqualValues(t, "addons.cluster.x-k8s.io/resource-set", secret.Type)
		for file, manifest := range secret.Data {
			strategies[file] = set.Spec.Strategy
			require.Equal(t, file == "bootstrap.yaml", strings.Contains(string(manifest), "kind: Secret"))
			require.Equal(t, file == "namespace.yaml", strings.Contains(string(manifest), "kind: Namespace"))
		}
	}
	require.Equal(t, map[string]string{"namespace.yaml": "ApplyOnce", "bootstrap.yaml": "Reconcile"}, strategies)

	second := o.dispatched(true)
	sets := o.sets()
	require.Len(t, sets, 2, "what was for the earlier one is gone")
	for _, set := range sets {
		require.Equal(t, second.ID, set.Labels[v1alpha1.OnboardingLabel])
	}
	_, err := onboarding.Offboard(t.Context(), plane.Client, o.cluster, false)
	require.NoError(t, err)
	require.Empty(t, o.sets())
	var secrets corev1.SecretList
	require.NoError(t, plane.Client.List(t.Context(), &secrets, kubeclient.InNamespace(o.cluster.Namespace),
		kubeclient.HasLabels{v1alpha1.OnboardingLabel}))
	require.Empty(t, secrets.Items)
}

// The hub plays the role of the spoke.
func TestTheSecretIsWrittenIntoTheSpoke(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	o.options.Secret.Namespace = o.cluster.Namespace + "-new"
	prepare := func(again bool) *onboarding.Onboarding {
		o.options.Again = again
		prepared, err := onboarding.Prepare(t.Context(), plane.Client, o.options, clock.RealClock{})
		require.NoError(t, err)
		return prepared
	}
	first := prepare(false)
	require.NoError(t, first.Deliver(t.Context(), plane.Client, true))
	var secret corev1.Secret
	require.True(t, apierrors.IsNotFound(plane.Client.Get(t.Context(), o.options.Secret, &secret)), "a dry run writes nothing")
	for _, onboarding := range []*onboarding.Onboarding{first, prepare(false)} {
		require.NoError(t, onboarding.Deliver(t.Context(), plane.Client, true))
		require.NoError(t, onboarding.Deliver(t.Context(), plane.Client, false))
		require.NoError(t, plane.Client.Get(t.Context(), o.options.Secret, &secret))
		require.Equal(t, onboarding.Secret.Data, secret.Data)
	}
}

func TestMistakesInOnboardingAreNamed(t *testing.T) {
	t.Parallel()
	o := newOnboarded(t)
	for says, change := range map[string]func(*onboarding.Options){
		"there is no Cluster":                   func(o *onboarding.Options) { o.Cluster.Name = "none" },
		"it does not exist; name the secret":    func(o *onboarding.Options) { o.Issuer.Name = "none" },
		"trust domain":                          func(o *onboarding.Options) { o.TrustDomain = "not a domain" },
		"there is no certificate in them":       func(o *onboarding.Options) { o.ServerCA = []byte("nothing") },
		"is not the certificate of an authorit": func(o *onboarding.Options) { o.Issuer.Name = "leaf" },
	} {
		options := o.options
		change(&options)
		if options.Issuer.Name == "leaf" {
			prepared := o.onboard(true)
			plane.Create(t, &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Namespace: o.cluster.Namespace, Name: "leaf"}, Type: corev1.SecretTypeTLS, Data: prepared.Data,
			})
			options.Again = true
		}
		_, err := onboarding.Prepare(t.Context(), plane.Client, options, clock.RealClock{})
		require.ErrorContains(t, err, says)
	}
}

// The look at a Spoke is not part of a call.
func TestAPanicCostsOneSpokeAlone(t *testing.T) {
	t.Parallel()
	namespace, now := plane.Namespace(t), clocktesting.NewFakeClock(time.Now())
	broken := true
	keeper := spokes.New(spokes.Config{
		Client: plane.Client, Namespaces: []string{namespace}, Clock: now, Serves: func(cluster types.NamespacedName) bool {
			if broken && cluster.Name == "a" { // it is the first
				panic("a bug")
			}
			return true
		},
	})
	connected := func(name string) bool {
		var spoke v1alpha1.Spoke
		require.NoError(t, plane.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, &spoke))
		return meta.IsStatusConditionTrue(spoke.Status.Conditions, v1alpha1.ConnectedCondition)
	}
	for _, name := range []string{"a", "b"} {
		cluster := capitest.NewCluster(namespace, name)
		plane.Create(t, cluster)
		keeper.Note(t.Context(), cluster, spokes.Contact{Version: "karpenter/v1"})
		require.True(t, connected(name))
	}
	_ = keeper.Look(t.Context()) // it has been looking for a while
	now.Step(time.Hour)
	require.ErrorContains(t, keeper.Look(t.Context()), "a bug")
	require.True(t, connected("a"))
	require.False(t, connected("b"))
	broken = false
	require.NoError(t, keeper.Look(t.Context()))
	require.False(t, connected("a"))
}

// A Spoke is no longer connected once its shim has not synchronized for 15 minutes.
func TestASilentSpokeIsNotConnected(t *testing.T) {
	t.Parallel()
	namespace := plane.Namespace(t)
	cluster := capitest.NewCluster(namespace, "spoke")
	plane.Create(t, cluster)
	now := clocktesting.NewFakeClock(time.Now())
	keeper := spokes.New(spokes.Config{
		Client: plane.Client, Namespaces: []string{namespace}, Clock: now, Serves: func(types.NamespacedName) bool { return true },
	})
	connected := func() *metav1.Condition {
		var spoke v1alpha1.Spoke
		require.NoError(t, plane.Client.Get(t.Context(), kubeclient.ObjectKeyFromObject(cluster), &spoke))
		return meta.FindStatusCondition(spoke.Status.Conditions, v1alpha1.ConnectedCondition)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(keeper.Collector())
	shown := func(name string, value int64) {
		families, err := registry.Gather()
		require.NoError(t, err)
		for _, family := range families {
			if family.GetName() == name {
				require.Len(t, family.GetMetric(), 1)
				require.InDelta(t, value, family.GetMetric()[0].GetGauge().GetValue(), 0)
				return
			}
		}
		require.Fail(t, "there is no metric "+name)
	}
	record := func(alert string, without scrapes.Scrape) {
		t.Helper()
		scrapes.Record(t, alert, without, scraped(t, registry, now.Now()), scrapes.Renamed("namespace", namespace, "fleet"))
	}
	keeper.Note(t.Context(), cluster, spokes.Contact{Version: "karpenter/v1", NotBefore: now.Now(), NotAfter: now.Now().Add(24 * time.Hour)})
	require.NoError(t, keeper.Look(t.Context()))
	fresh := scraped(t, registry, now.Now())

	// The shim has not renewed it.
	now.Step(5 * time.Minute)
	until := now.Now().Add(time.Hour)
	from := until.Add(-24 * time.Hour)
	keeper.Note(t.Context(), cluster, spokes.Contact{Version: "karpenter/v1", NotBefore: from, NotAfter: until})
	require.NoError(t, keeper.Look(t.Context()))
	require.Equal(t, metav1.ConditionTrue, connected().Status)
	shown("capi_agent_spoke_connected", 1)
	shown("capi_agent_spoke_last_sync_timestamp_seconds", now.Now().Unix())
	shown("capi_agent_spoke_certificate_not_after_seconds", until.Unix())
	shown("capi_agent_spoke_certificate_not_before_seconds", from.Unix())
	record("CapiAgentSpokeCertificateExpiring", fresh)
	heard := scraped(t, registry, now.Now())
	now.Step(14 * time.Minute)
	require.NoError(t, keeper.Look(t.Context()))
	require.Equal(t, metav1.ConditionTrue, connected().Status)
	now.Step(2 * time.Minute)
	require.NoError(t, keeper.Look(t.Context()))
	require.Equal(t, v1alpha1.SilentReason, connected().Reason)
	shown("capi_agent_spoke_connected", 0)
	record("CapiAgentSpokeSilent", heard)
	keeper.Note(t.Context(), cluster, spokes.Contact{Version: "karpenter/v1"})
	require.Equal(t, v1alpha1.SynchronizedReason, connected().Reason)
}

// Claims and Machines are written when another cluster is recorded. A caller may name another one
// each time.
func TestAnotherClusterIsRecordedOnlyNowAndThen(t *testing.T) {
	t.Parallel()
	namespace := plane.Namespace(t)
	cluster := capitest.NewCluster(namespace, "spoke")
	plane.Create(t, cluster)
	now := clocktesting.NewFakeClock(time.Now())
	keeper := spokes.New(spokes.Config{
		Client: plane.Client, Namespaces: []string{namespace}, Clock: now, Serves: func(types.NamespacedName) bool { return true },
	})
	key := kubeclient.ObjectKeyFromObject(cluster)
	require.Empty(t, keeper.SpokeID(key))
	for i, note := range []struct {
		spoke, recorded string
		after           time.Duration
	}{
		{spoke: "", recorded: ""},
		{spoke: "first", recorded: "first", after: time.Second},
		{spoke: "second", recorded: "first", after: time.Minute},
		{spoke: "first", recorded: "first", after: time.Minute},
		{spoke: "", recorded: "first", after: time.Minute},
		{spoke: "second", recorded: "first", after: time.Second},
		{spoke: "second", recorded: "second", after: 5 * time.Minute},
		{spoke: "", recorded: "second", after: 5 * time.Minute},
		{spoke: "first", recorded: "second", after: time.Second},
	} {
		now.Step(note.after)
		keeper.Note(t.Context(), cluster, spokes.Contact{Version: "karpenter/v1", SpokeID: note.spoke, Matched: true})
		require.Equal(t, note.recorded, keeper.SpokeID(key), i)
	}
}

// Each agent also shows the shims that call the other agents, and a watcher receives each change
// once.
func TestWhatOneAgentNotesTheOthersShow(t *testing.T) {
	t.Parallel()
	namespace := plane.Namespace(t)
	cluster := capitest.NewCluster(namespace, "spoke")
	plane.Create(t, cluster)
	key, now := kubeclient.ObjectKeyFromObject(cluster), clocktesting.NewFakeClock(time.Now())
	var told []types.NamespacedName
	keeper := func() *spokes.Spokes {
		return spokes.New(spokes.Config{
			Client: plane.Client, Namespaces: []string{namespace}, Clock: now, Serves: func(types.NamespacedName) bool { return true },
			Changed: func(cluster types.NamespacedName) { told = append(told, cluster) },
		})
	}
	one, other := keeper(), keeper()
	one.Note(t.Context(), cluster, spokes.Contact{Version: "karpenter/v1"})
	require.Equal(t, []types.NamespacedName{key}, told)
	status, known := one.Status(key)
	require.True(t, known)
	require.Equal(t, "karpenter/v1", status.ShimVersion)
	_, known = other.Status(key)
	require.False(t, known)

	now.Step(time.Minute)
	require.NoError(t, other.Read(t.Context()))
	require.NoError(t, other.Look(t.Context()))
	require.NoError(t, one.Look(t.Context()))
	require.Equal(t, []types.NamespacedName{key, key}, told, "the other has learnt it, and nothing else is new")
	status, known = other.Status(key)
	require.True(t, known)
	require.True(t, meta.IsStatusConditionTrue(status.Conditions, v1alpha1.ConnectedCondition))

	now.Step(time.Hour)
	require.NoError(t, other.Look(t.Context()))
	require.Len(t, told, 3)
	status, _ = other.Status(key)
	require.True(t, meta.IsStatusConditionFalse(status.Conditions, v1alpha1.ConnectedCondition))

	require.NoError(t, plane.Client.Delete(t.Context(), &v1alpha1.Spoke{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "spoke"}}))
	require.NoError(t, other.Look(t.Context()))
	require.Len(t, told, 4)
	_, known = other.Status(key)
	require.False(t, known)
}
