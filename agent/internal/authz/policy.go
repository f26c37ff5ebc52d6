package authz

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

// PolicyKey is the key that holds the policy in its ConfigMap.
const PolicyKey = "policy.yaml"

// Policy grants roles to identities, restricts which issuers may sign which identities, and denies
// certificates.
type Policy struct {
	grants  map[string][]Grant
	issuers map[fingerprint]*issuer // empty: every issuer may sign every identity
	// clusters are patterns of the Clusters whose own identities have the role cluster. Nil means
	// all Clusters.
	clusters []types.NamespacedName
	denials  []denial
}

type policyFile struct {
	Identities []policyIdentity `json:"identities"`
	Issuers    []policyIssuer   `json:"issuers,omitempty"`
	// Clusters are those whose own identities have the role cluster, as <namespace>/<name>, where
	// `*` matches any characters. If the field is missing, every Cluster's identity has the role.
	Clusters *[]string      `json:"clusters,omitempty"`
	Deny     []policyDenial `json:"deny,omitempty"`
}

type policyIdentity struct {
	// ID is the SPIFFE ID.
	ID string `json:"id"`
	// Roles are reader, autoscaler or admin.
	Roles []Role `json:"roles"`
	// Clusters are <namespace>/<name>, where `*` matches any characters.
	Clusters []string `json:"clusters,omitempty"`
	// AllClusters grants the roles for every Cluster.
	AllClusters bool `json:"allClusters,omitempty"`
}

// ParsePolicy parses a policy:
//
//	identities:
//	- id: spiffe://karpenter-capi/team/observability
//	  roles: [reader]
//	  allClusters: true
//	- id: spiffe://karpenter-capi/cluster-autoscaler/a
//	  roles: [autoscaler]
//	  clusters: [fleet/a]
//
//	issuers:
//	- fingerprints: [6A:1E:…]
//	  clusters: [fleet/a, team-b/*]
//
//	clusters: [fleet/*]
//
//	deny:
//	- id: spiffe://karpenter-capi/cluster/fleet/c
//	  issuedBefore: 2026-11-01T00:00:00Z
//	- serial: 4F:00:…
//
// The identities must belong to the trust domain. The error lists every mistake.
func ParsePolicy(content []byte, trustDomain string) (*Policy, error) {
	if len(bytes.TrimSpace(content)) == 0 {
		// This is more likely a file that is being written than a policy that revokes all grants.
		return nil, errors.New("not a policy: it is empty; write `identities: []` to grant nothing")
	}
	var file policyFile
	if err := yaml.UnmarshalStrict(content, &file); err != nil {
		return nil, fmt.Errorf("not a policy: %w", err)
	}
	policy := &Policy{grants: map[string][]Grant{}}
	errs := []error{checkClusters(content)}
	for i, identity := range file.Identities {
		wrong := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("identities[%d] %q: %s", i, identity.ID, fmt.Sprintf(format, args...)))
		}
		if err := checkID(identity.ID, trustDomain); err != nil {
			wrong("id %v", err)
		}
		if _, known := policy.grants[identity.ID]; known {
			wrong("the id appears twice; list all of its roles in one entry")
		}
		clusters := parseClusters(identity.Clusters, wrong)
		switch {
		case identity.AllClusters && len(clusters) > 0:
			wrong("allClusters and clusters exclude each other")
		case !identity.AllClusters && len(identity.Clusters) == 0:
			wrong("it has neither clusters nor allClusters")
		}
		if len(identity.Roles) == 0 {
			wrong("it has no roles")
		}
		grants := make([]Grant, 0, len(identity.Roles))
		for _, role := range identity.Roles {
			if grantable := []Role{RoleReader, RoleAutoscaler, RoleAdmin}; !slices.Contains(grantable, role) {
				wrong("role %q is not one of reader, autoscaler, admin", role)
			}
			grants = append(grants, Grant{Role: role, AllClusters: identity.AllClusters, Clusters: clusters})
		}
		policy.grants[identity.ID] = grants
	}
	if file.Clusters != nil {
		policy.clusters = parseClusters(*file.Clusters, func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("clusters: %s", fmt.Sprintf(format, args...)))
		})
	}
	var err error
	policy.issuers, err = parseIssuers(file.Issuers, trustDomain)
	errs = append(errs, err)
	policy.denials, err = parseDenials(file.Deny, trustDomain)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	return policy, nil
}

// checkClusters returns an error if there is the field clusters without a value, which looks like
// no Clusters, and would mean all.
func checkClusters(content []byte) error {
	var fields map[string]any
	if err := yaml.Unmarshal(content, &fields); err != nil {
		return err
	}
	for field, value := range fields {
		if strings.EqualFold(field, "clusters") && value == nil { // the parser ignores the case
			return fmt.Errorf("%s: it has no value; write [] for no Clusters, or leave the field out for all", field)
		}
	}
	return nil
}

// String summarizes the policy in one line.
func (p *Policy) String() string {
	own := "every Cluster's own identity has its role"
	if p.clusters != nil {
		own = "Clusters whose own identities have their role: " + cmp.Or(join(p.clusters), "none")
	}
	return fmt.Sprintf("%s; identities: %d; fingerprints of issuers: %d; denials: %d", own, len(p.grants), len(p.issuers), len(p.denials))
}

func checkID(id, trustDomain string) error {
	parsed, err := spiffeid.FromString(id)
	if err != nil {
		return fmt.Errorf("is not a SPIFFE id: %w", err)
	}
	if parsed.TrustDomain().Name() != trustDomain {
		return fmt.Errorf("is of the trust domain %q, and the agent's is %q", parsed.TrustDomain().Name(), trustDomain)
	}
	if bare, _, err := splitOnboarding(parsed); err != nil || bare != parsed {
		return fmt.Errorf("names an onboarding, but policies cannot refer to onboardings, because they change: write %s", bare)
	}
	return nil
}

// PolicyFile follows a policy file.
type PolicyFile struct {
	// Interval is how often the file is read. Zero means every five seconds.
	Interval time.Duration

	path    string
	parse   func(content []byte) (*Policy, error)
	log     logr.Logger
	content []byte // as last read, nil before
	failure error  // why content cannot be used
	current atomic.Pointer[Policy]
	// unusable is whether the file could not be used when it was last read.
	unusable atomic.Bool
}

// LoadPolicyFile reads a policy file, which must be valid for the trust domain.
func LoadPolicyFile(path, trustDomain string, log logr.Logger) (*PolicyFile, error) {
	f := &PolicyFile{
		path: path, log: log.WithValues("file", path),
		parse: func(content []byte) (*Policy, error) { return ParsePolicy(content, trustDomain) },
	}
	if err := f.load(); err != nil {
		return nil, err
	}
	return f, nil
}

// Current returns the last valid policy of the file. It is safe for concurrent use.
func (f *PolicyFile) Current() *Policy { return f.current.Load() }

// Collector returns the metric that a policy in a ConfigMap has, too.
func (f *PolicyFile) Collector() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "capi_agent_policy_usable",
		Help: "1 if the current policy is usable. 0 if the last usable one is in use instead, or none.",
	}, func() float64 {
		if f.unusable.Load() {
			return 0
		}
		return 1
	})
}

// Follow rereads the file periodically until the context ends. If the file is invalid, the last
// valid policy stays in force. It polls, because the notifications of a mounted ConfigMap are about
// links of the kubelet, and a file that was replaced needs a new watch.
func (f *PolicyFile) Follow(ctx context.Context) {
	interval := f.Interval
	if interval == 0 {
		interval = 5 * time.Second
	}
	failed := ""
	wait.UntilWithContext(ctx, func(context.Context) {
		err := f.load()
		f.unusable.Store(err != nil)
		switch {
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			f.log.Error(err, "the policy file cannot be used; the last valid one stays in use")
		}
	}, interval)
}

func (f *PolicyFile) load() error {
	content, err := os.ReadFile(f.path)
	if err != nil {
		return fmt.Errorf("reading the policy file: %w", err)
	}
	if f.content != nil && bytes.Equal(content, f.content) {
		return f.failure
	}
	f.content, f.failure = content, nil
	var policy *Policy
	err = panics.Confined(f.log, panics.Objects, "the policy file is not used because of a bug in the agent", func() (err error) {
		policy, err = f.parse(content)
		return err
	})
	if err != nil {
		f.failure = fmt.Errorf("policy file %s: %w", f.path, err)
		return f.failure
	}
	if f.current.Load() != nil {
		f.log.Info("the changed policy file is in use")
	}
	f.current.Store(policy)
	return nil
}
