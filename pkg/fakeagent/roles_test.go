package fakeagent_test

import (
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The rights of a role are tested with one call that reads, and one that claims under each holder.
func may(t *testing.T, c *client.Client, holder, id string) (reads, claims bool) {
	t.Helper()
	_, err := c.NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: fakeagent.DefaultCluster()})
	reads = allowed(t, err)
	_, err = c.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: fakeagent.DefaultCluster(), ClaimId: id, Holder: holder, Candidates: []string{workers},
	})
	return reads, allowed(t, err)
}

func allowed(t *testing.T, err error) bool {
	t.Helper()
	if err != nil {
		require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	}
	return err == nil
}

func TestWhatRolesMayDo(t *testing.T) {
	agent := start(t)
	own, all := []string{"default/workload"}, []string{"*/*"}
	for name, c := range map[string]struct {
		grants        []fakeagent.Grant
		holder        string
		reads, claims bool
	}{
		"no role":                  {nil, "karpenter", false, false},
		"reader":                   {[]fakeagent.Grant{{Role: fakeagent.RoleReader, Clusters: own}}, "karpenter", true, false},
		"reader of all":            {[]fakeagent.Grant{{Role: fakeagent.RoleReader, AllClusters: true}}, "karpenter", true, false},
		"reader by a pattern":      {[]fakeagent.Grant{{Role: fakeagent.RoleReader, Clusters: []string{"def*/work*"}}}, "karpenter", true, false},
		"reader of another":        {[]fakeagent.Grant{{Role: fakeagent.RoleReader, Clusters: []string{"default/other"}}}, "karpenter", false, false},
		"bootstrap":                {[]fakeagent.Grant{{Role: fakeagent.RoleBootstrap, Clusters: own}}, "karpenter", false, false},
		"cluster":                  {[]fakeagent.Grant{{Role: fakeagent.RoleCluster, Clusters: own}}, "karpenter", true, true},
		"cluster as an autoscaler": {[]fakeagent.Grant{{Role: fakeagent.RoleCluster, Clusters: own}}, "cluster-autoscaler", true, false},
		"autoscaler":               {[]fakeagent.Grant{{Role: fakeagent.RoleAutoscaler, Clusters: all}}, "cluster-autoscaler-a", true, true},
		"autoscaler as karpenter":  {[]fakeagent.Grant{{Role: fakeagent.RoleAutoscaler, Clusters: all}}, "karpenter", true, false},
		"admin as anyone":          {[]fakeagent.Grant{{Role: fakeagent.RoleAdmin, AllClusters: true}}, "a-person", true, true},
		"cluster here, reader of more": {[]fakeagent.Grant{
			{Role: fakeagent.RoleReader, AllClusters: true}, {Role: fakeagent.RoleCluster, Clusters: own},
		}, "karpenter", true, true},
		"autoscaler elsewhere, and reader": {[]fakeagent.Grant{
			{Role: fakeagent.RoleAutoscaler, Clusters: []string{"default/other"}}, {Role: fakeagent.RoleReader, AllClusters: true},
		}, "cluster-autoscaler", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			id := "by-" + strings.NewReplacer(" ", "-", ",", "").Replace(name)
			caller := agent.ClientAs(fakeagent.Identity{ID: "spiffe://karpenter-capi/" + t.Name(), Grants: c.grants})
			reads, claims := may(t, caller, c.holder, id)
			assert.Equal(t, c.reads, reads, "reads")
			assert.Equal(t, c.claims, claims, "claims")
			status, err := caller.Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
			require.NoError(t, err)
			assert.Equal(t, "spiffe://karpenter-capi/"+t.Name(), status.GetIdentity())
			assert.Equal(t, len(c.grants) > 0, status.GetVersion() != "")
		})
	}
}

// serveTLS serves the agent on loopback. It returns a function that creates clients with SPIFFE
// IDs.
func serveTLS(
	t *testing.T, agent *fakeagent.Agent, authority *fakeagent.Authority, grants map[string][]fakeagent.Grant,
) func(id string) *client.Client {
	t.Helper()
	certificate, key, err := authority.IssueServer("127.0.0.1")
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	agent.ServeTLS(listener, &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: authority.Pool()},
		func(id string) []fakeagent.Grant { return grants[id] })
	return func(id string) *client.Client {
		certificate, key, err := authority.IssueClient(id)
		require.NoError(t, err)
		return dialTLS(t, listener.Addr().String(), authority.PEM(), certificate, key)
	}
}

func dialTLS(t *testing.T, address string, authorities, certificate, key []byte) *client.Client {
	t.Helper()
	folder := t.TempDir()
	files := client.TLS{
		CertFile: filepath.Join(folder, "tls.crt"), KeyFile: filepath.Join(folder, "tls.key"), CAFile: filepath.Join(folder, "ca.crt"),
	}
	for path, content := range map[string][]byte{files.CertFile: certificate, files.KeyFile: key, files.CAFile: authorities} {
		require.NoError(t, os.WriteFile(path, content, 0o600))
	}
	c, err := client.New(client.Options{Address: address, TLS: &files})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func TestCertificatesGiveIdentities(t *testing.T) {
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	agent := start(t, fakeagent.WithAuthority(authority))
	as := serveTLS(t, agent, authority, map[string][]fakeagent.Grant{
		"spiffe://karpenter-capi/team/a": {{Role: fakeagent.RoleReader, AllClusters: true}},
	})
	for id, want := range map[string]struct{ reads, claims bool }{
		"spiffe://karpenter-capi/cluster/default/workload": {true, true},
		"spiffe://karpenter-capi/cluster/default/other":    {false, false},
		"spiffe://karpenter-capi/team/a":                   {true, false},
		"spiffe://karpenter-capi/team/b":                   {false, false},
	} {
		reads, claims := may(t, as(id), "karpenter", "a-claim")
		assert.Equal(t, want.reads, reads, "%s reads", id)
		assert.Equal(t, want.claims, claims, "%s claims", id)
	}
}

func TestACertificateWithoutAnIdentityMayAskForHealthAlone(t *testing.T) {
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	agent := start(t)
	c := serveTLS(t, agent, authority, nil)("spiffe://elsewhere/cluster/default/workload")
	_, err = c.Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
	require.Equal(t, agenterrors.ReasonUnauthenticated, agenterrors.ReasonOf(err), "%v", err)
	require.ErrorContains(t, err, `trust domain is "elsewhere", not "karpenter-capi"`)
	_, err = grpc_health_v1.NewHealthClient(c.Conn()).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	require.NoError(t, err)
}

func TestOnlyCertificatesOfThePresentOnboardingAreOfUse(t *testing.T) {
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	agent := start(t, fakeagent.WithAuthority(authority))
	as := serveTLS(t, agent, authority, nil)
	const own = "spiffe://karpenter-capi/cluster/default/workload"
	list := func(id string) error {
		_, err := as(id).NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: fakeagent.DefaultCluster()})
		return err
	}
	require.NoError(t, list(own))
	require.Error(t, list(own+"/first"))
	agent.Onboard(fakeagent.DefaultCluster(), "first")
	require.NoError(t, list(own+"/first"))
	require.Equal(t, agenterrors.ReasonUnauthenticated, agenterrors.ReasonOf(list(own)))
	require.Equal(t, agenterrors.ReasonUnauthenticated, agenterrors.ReasonOf(list(own+"/second")))
}

func TestGrantsAreChecked(t *testing.T) {
	for want, grant := range map[string]fakeagent.Grant{
		`role: "root" is not one of`:         {Role: "root", AllClusters: true},
		"clusters: name at least one":        {Role: fakeagent.RoleReader},
		"but not both":                       {Role: fakeagent.RoleReader, AllClusters: true, Clusters: []string{"a/b"}},
		`clusters[1]: "a" is not <namespace`: {Role: fakeagent.RoleReader, Clusters: []string{"a/b", "a"}},
		`clusters[0]: "a/["`:                 {Role: fakeagent.RoleReader, Clusters: []string{"a/["}},
	} {
		require.ErrorContains(t, grant.Validate(), want)
	}
	require.NoError(t, fakeagent.Grant{Role: fakeagent.RoleReader, Clusters: []string{"team-*/*"}}.Validate())
}
