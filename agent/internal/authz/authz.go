// Package authz says who a caller is and what it may do.
//
// A caller's identity is the single URI in its certificate. What it may do are its grants: a role, for some Clusters. The
// identity of a Cluster has the role `cluster` for that Cluster by itself; a [Policy] file grants more. Which roles may call a
// method is in the table [Methods], and a method that is not in it may be called by nobody.
package authz

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

// Role is a set of methods; see [Methods].
type Role string

const (
	// RoleCluster is that of a Cluster's own shim.
	RoleCluster Role = "cluster"
	// RoleReader may read.
	RoleReader Role = "reader"
	// RoleAutoscaler may read, and make and release claims.
	RoleAutoscaler Role = "autoscaler"
	// RoleAdmin may do everything.
	RoleAdmin Role = "admin"
	// RoleBootstrap is that of a shim that has no certificate of its Cluster yet: it may get one, and nothing else.
	RoleBootstrap Role = "bootstrap"
)

// Names of callers that need no certificate.
const (
	// UnixSocket is a caller on the unix socket.
	UnixSocket = "unix"
	// Loopback is a caller on the loopback interface.
	Loopback = "loopback"
)

// Grant gives a role for some Clusters.
type Grant struct {
	Role Role
	// AllClusters gives it for every Cluster. Clusters names them otherwise, in which `*` stands for any characters.
	AllClusters bool
	Clusters    []types.NamespacedName
}

func (g Grant) covers(cluster types.NamespacedName) bool {
	return g.AllClusters || among(g.Clusters, cluster)
}

// String says what the grant gives, for people.
func (g Grant) String() string {
	if g.AllClusters {
		return fmt.Sprintf("%s for all Clusters", g.Role)
	}
	return fmt.Sprintf("%s for %s", g.Role, join(g.Clusters))
}

// Caller is somebody who calls, and what it may do.
type Caller struct {
	// Identity is a SPIFFE id, without the onboarding, or [UnixSocket] or [Loopback].
	Identity string
	Grants   []Grant
	// Onboarding is the one that the certificate is of. Nil for callers that are no Cluster: they are not onboarded.
	Onboarding *Onboarding
}

// Onboarding identifies one onboarding of a Cluster. Its id is a label of the Cluster and part of every certificate that is issued for it. When the
// Cluster is onboarded again, or made again under the same name, earlier certificates are refused.
type Onboarding struct {
	Cluster types.NamespacedName
	// ID is empty in certificates that were issued elsewhere. They are a Cluster's for as long as it has no onboarding.
	ID string
}

// Everything is what an administrator of all Clusters may do.
func Everything() Grant { return Grant{Role: RoleAdmin, AllClusters: true} }

// ParseGrant returns a grant of any role for Clusters, each <namespace>/<name>, in which `*` stands for any characters. An administrator without
// Clusters is one of all of them. The role cluster is for one Cluster, and no pattern. An error names every mistake.
func ParseGrant(role string, clusters []string) (Grant, error) {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	grant := Grant{Role: Role(role), AllClusters: len(clusters) == 0}
	if !grant.AllClusters {
		grant.Clusters = parseClusters(clusters, wrong)
	}
	switch grant.Role {
	case RoleAdmin:
	case RoleReader, RoleAutoscaler:
		if len(clusters) == 0 {
			wrong("the role %s is for some Clusters; name them, or */* for all", role)
		}
	case RoleCluster:
		if len(clusters) != 1 || strings.Contains(clusters[0], "*") {
			wrong("the role cluster is that of one Cluster; name it, without *")
		}
	default:
		wrong("role %q is none of cluster, reader, autoscaler, admin", role)
	}
	return grant, errors.Join(errs...)
}

// MayCall reports whether the caller may call a method at all, for whatever Cluster.
func (c Caller) MayCall(rule Rule) bool {
	return rule.Anyone || rule.Everyone || slices.ContainsFunc(c.Grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) })
}

// MayCallFor reports whether the caller may call a method for a Cluster.
func (c Caller) MayCallFor(rule Rule, cluster types.NamespacedName) bool {
	return slices.ContainsFunc(c.Grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) && g.covers(cluster) })
}

// MaySeeAll reports whether the caller may call a method for every Cluster, so that it may also learn which do not exist.
func (c Caller) MaySeeAll(rule Rule) bool {
	return slices.ContainsFunc(c.Grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) && g.AllClusters })
}

// Roles returns the caller's roles, each once.
func (c Caller) Roles() []string {
	var roles []string
	for _, g := range c.Grants {
		if !slices.Contains(roles, string(g.Role)) {
			roles = append(roles, string(g.Role))
		}
	}
	return roles
}

// Clusters returns the Clusters that the caller's grants name, patterns as they are, or true when one covers all of them.
func (c Caller) Clusters() (named []types.NamespacedName, all bool) {
	for _, g := range c.Grants {
		if g.AllClusters {
			return nil, true
		}
		for _, cluster := range g.Clusters {
			if !slices.Contains(named, cluster) {
				named = append(named, cluster)
			}
		}
	}
	return named, false
}

// Authorizer makes callers of identities. It is safe for concurrent use.
type Authorizer struct {
	trustDomain spiffeid.TrustDomain
	policy      func() *Policy
	clock       clock.PassiveClock
}

// New returns an authorizer for the identities of a trust domain. The function returns the policy that is valid now; nil means
// that there is none.
func New(trustDomain string, policy func() *Policy, c clock.PassiveClock) (*Authorizer, error) {
	domain, err := spiffeid.TrustDomainFromString(trustDomain)
	if err != nil {
		return nil, fmt.Errorf("trust domain %q: %w", trustDomain, err)
	}
	if policy == nil {
		policy = func() *Policy { return nil }
	}
	return &Authorizer{trustDomain: domain, policy: policy, clock: c}, nil
}

// FromChains returns the caller that a client certificate belongs to, which was verified by these chains: each begins with the
// certificate, and there is at least one. An error says why its identity cannot be used, or not any more: the handshake is the past of a
// connection.
func (a *Authorizer) FromChains(chains [][]*x509.Certificate) (Caller, error) {
	certificate := chains[0][0]
	if len(certificate.URIs) != 1 {
		return Caller{}, fmt.Errorf("the client certificate has %d URI names; exactly one, a SPIFFE id, is needed", len(certificate.URIs))
	}
	id, err := spiffeid.FromURI(certificate.URIs[0])
	if err != nil {
		return Caller{}, fmt.Errorf("the client certificate's URI is not a SPIFFE id: %w", err)
	}
	if !id.MemberOf(a.trustDomain) {
		return Caller{}, fmt.Errorf("the client certificate's trust domain is %q, not %q", id.TrustDomain().Name(), a.trustDomain.Name())
	}
	if until := ValidUntil(chains); a.clock.Now().After(until) {
		return Caller{}, fmt.Errorf("the client certificate has expired at %s", until.UTC().Format(time.RFC3339))
	}
	id, own, err := splitOnboarding(id)
	if err != nil {
		return Caller{}, err
	}
	policy := a.policy()
	if err := policy.checkDenied(id, chains); err != nil {
		return Caller{}, err
	}
	if err := policy.checkIssuer(id, chains); err != nil {
		return Caller{}, err
	}
	caller := Caller{Identity: id.String()}
	if own != nil {
		caller.Onboarding = &own.Onboarding
		if policy.lists(own.Cluster) {
			caller.Grants = append(caller.Grants, Grant{Role: own.role, Clusters: []types.NamespacedName{own.Cluster}})
		}
	}
	if policy != nil {
		caller.Grants = append(caller.Grants, policy.grants[id.String()]...)
	}
	return caller, nil
}

// ValidUntil returns when the last of the verified chains expires. A chain expires with the first of its certificates.
func ValidUntil(chains [][]*x509.Certificate) time.Time {
	var until time.Time
	for _, chain := range chains {
		of := chain[0].NotAfter
		for _, certificate := range chain[1:] {
			if certificate.NotAfter.Before(of) {
				of = certificate.NotAfter
			}
		}
		if of.After(until) {
			until = of
		}
	}
	return until
}

// lists reports whether the Cluster's own identity has its role.
func (p *Policy) lists(cluster types.NamespacedName) bool {
	return p == nil || p.clusters == nil || among(p.clusters, cluster)
}

// First segments of the paths of Clusters' own identities.
const (
	clusterPath   = "cluster"
	bootstrapPath = "bootstrap"
)

// ownIdentity is what an identity says that is a Cluster's own.
type ownIdentity struct {
	Onboarding

	role Role
}

// splitOnboarding returns an identity without the onboarding, which policies and limits do not know, and what it says if it is a Cluster's own:
//
//	/cluster/<namespace>/<name>[/<onboarding>]
//	/bootstrap/<namespace>/<name>/<onboarding>
func splitOnboarding(id spiffeid.ID) (spiffeid.ID, *ownIdentity, error) {
	parts := strings.Split(strings.TrimPrefix(id.Path(), "/"), "/")
	role := map[string]Role{clusterPath: RoleCluster, bootstrapPath: RoleBootstrap}[parts[0]]
	switch {
	case role == RoleCluster && len(parts) == 3:
		return id, &ownIdentity{Onboarding{Cluster: types.NamespacedName{Namespace: parts[1], Name: parts[2]}}, role}, nil
	case role != "" && len(parts) == 4:
		bare, err := spiffeid.FromSegments(id.TrustDomain(), parts[:3]...)
		if err != nil {
			return id, nil, fmt.Errorf("the client certificate's URI: %w", err)
		}
		own := Onboarding{Cluster: types.NamespacedName{Namespace: parts[1], Name: parts[2]}, ID: parts[3]}
		return bare, &ownIdentity{own, role}, nil
	}
	return id, nil, nil
}

// clusterOf returns the Cluster whose own an identity is.
func clusterOf(id spiffeid.ID) (types.NamespacedName, bool) {
	parts := strings.Split(strings.TrimPrefix(id.Path(), "/"), "/")
	if len(parts) != 3 || parts[0] != clusterPath && parts[0] != bootstrapPath {
		return types.NamespacedName{}, false
	}
	return types.NamespacedName{Namespace: parts[1], Name: parts[2]}, true
}

// ClusterIdentity returns the identity of a Cluster by an onboarding.
func ClusterIdentity(trustDomain string, of Onboarding) (spiffeid.ID, error) {
	return ownID(trustDomain, clusterPath, of)
}

// BootstrapIdentity returns the identity with which a shim asks for its first certificate of an onboarding.
func BootstrapIdentity(trustDomain string, of Onboarding) (spiffeid.ID, error) {
	return ownID(trustDomain, bootstrapPath, of)
}

func ownID(trustDomain, path string, of Onboarding) (spiffeid.ID, error) {
	domain, err := spiffeid.TrustDomainFromString(trustDomain)
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("trust domain %q: %w", trustDomain, err)
	}
	id, err := spiffeid.FromSegments(domain, path, of.Cluster.Namespace, of.Cluster.Name, of.ID)
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("the onboarding %q of the Cluster %s: %w", of.ID, of.Cluster, err)
	}
	return id, nil
}
