package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
)

func TestAPolicyIsCheckedAsTheAgentDoes(t *testing.T) {
	authority, folder := testpki.New(t), t.TempDir()
	certificate := authority.Issue(t, folder, authority, "spiffe://karpenter-capi/cluster/fleet/a").CertFile
	grants := "identities:\n- {id: spiffe://karpenter-capi/cluster/fleet/a, roles: [reader], allClusters: true}\n"
	for name, c := range map[string]struct {
		policy    string
		arguments []string
		said, err string
	}{
		"a valid one": {
			policy: grants + "deny: [{serial: \"4f\"}]\n",
			said:   "valid: every Cluster's own identity has its role; identities: 1; fingerprints of issuers: 0; denials: 1\n",
		},
		"Clusters that are listed": {
			policy: "clusters: [fleet/a, team-*/b]", said: "Clusters whose own identities have their role: fleet/a, team-*/b;",
		},
		"a mistake": {policy: "identities:\n- {id: spiffe://karpenter-capi/x, roles: [root], clusters: [a]}\n", err: `role "root" is not one of`},
		"another trust domain": {
			policy: grants, arguments: []string{"--trust-domain=example.org"}, err: `the agent's is "example.org"`,
		},
		"what a certificate may do": {
			policy: grants, arguments: []string{"--certificate=" + certificate},
			said: "identity: spiffe://karpenter-capi/cluster/fleet/a\nrole: cluster for fleet/a\nrole: reader for all Clusters\n",
		},
		"a certificate without a role": {
			policy: "clusters: []", arguments: []string{"--certificate=" + certificate}, said: "roles: none; it may call GetStatus\n",
		},
		"a certificate that is denied": {
			policy: "deny: [{issuedBefore: " + time.Now().Format(time.RFC3339) + "}]", arguments: []string{"--certificate=" + certificate},
			err: "--certificate: refused: the policy denies the client certificate",
		},
		"no certificate": {
			policy: grants, arguments: []string{"--certificate=" + filepath.Join(folder, "tls.key")}, err: "does not contain any valid",
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "policy.yaml")
			require.NoError(t, os.WriteFile(path, []byte(c.policy), 0o600))
			said, err := run(t, append([]string{"policy", "check", path}, c.arguments...)...)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Contains(t, said, c.said)
		})
	}
	for says, arguments := range map[string][]string{
		"write `capi-agent policy check FILE`": {"policy", "check"},
		"write `capi-agent policy check":       {"policy"},
		"reading the policy file":              {"policy", "check", filepath.Join(folder, "none")},
	} {
		_, err := run(t, arguments...)
		require.ErrorContains(t, err, says)
	}
}
