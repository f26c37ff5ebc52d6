// Package authz identifies callers and decides what they may do.
//
// A caller's identity is the single URI in its certificate. Its rights are grants. A grant is a
// role for some Clusters. By default, the identity of a Cluster has the role `cluster` for that
// Cluster; a [Policy] can restrict this, and grants further roles. The table [Methods] lists the
// roles that may call each method. A method that is not in the table may not be called at all.
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

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Role is a set of methods; see [Methods].
type Role string

const (
	// RoleCluster is the role of a Cluster's own shim.
	RoleCluster Role = "cluster"
	// RoleReader may read.
	RoleReader Role = "reader"
	// RoleAutoscaler may read, and create and release claims.
	RoleAutoscaler Role = "autoscaler"
	// RoleAdmin may do everything.
	RoleAdmin Role = "admin"
	// RoleBootstrap is the role of a shim that has no certificate for its Cluster yet. It may only
	// request one.
	RoleBootstrap Role = "bootstrap"
)

// These are the identities of callers that need no certificate.
const (
	// UnixSocket is the identity of callers on the unix socket.
	UnixSocket = "unix"
	// Loopback is the identity of callers on the loopback interface.
	Loopback = "loopback"
)

// Grant is a role for some Clusters.
type Grant struct {
	Role Role
	// AllClusters grants the role for every Cluster. Otherwise Clusters lists the Clusters, where
	// `*` matches any characters.
	AllClusters bool
	Clusters    []types.NamespacedName
}

func (g Grant) covers(cluster types.NamespacedName) bool {
	return g.AllClusters || among(g.Clusters, cluster)
}

// String describes the grant, for messages.
func (g Grant) String() string {
	if g.AllClusters {
		return fmt.Sprintf("%s for all Clusters", g.Role)
	}
	return fmt.Sprintf("%s for %s", g.Role, join(g.Clusters))
}

// Caller is an identified caller, with its rights.
type Caller struct {
	// Identity is a SPIFFE ID without the onboarding, [UnixSocket] or [Loopback].
	Identity string
	Grants   []Grant
	// Onboarding is the onboarding that the certificate belongs to. It is nil for callers that are
	// not Clusters, which are not onboarded.
	Onboarding *Onboarding
}

// Onboarding identifies one onboarding of a Cluster. Its ID is a label of the Cluster, and part of
// every certificate issued for it. When the Cluster is onboarded again, or recreated under the same
// name, earlier certificates are rejected.
type Onboarding struct {
	Cluster types.NamespacedName
	// ID is empty in certificates that were issued elsewhere. These are valid as long as the
	// Cluster has no onboarding.
	ID string
}

// Everything returns the grant of an administrator of all Clusters.
func Everything() Grant { return Grant{Role: RoleAdmin, AllClusters: true} }

// ParseGrant returns a grant of any role for the given Clusters. Each is <namespace>/<name>, where
// `*` matches any characters. The role admin without Clusters is granted for all Clusters. The role
// cluster needs exactly one Cluster, without `*`. The error lists every mistake.
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
		wrong("role %q is not one of cluster, reader, autoscaler, admin", role)
	}
	return grant, errors.Join(errs...)
}

// MayCall reports whether the caller may call a method for at least one Cluster.
func (c Caller) MayCall(rule Rule) bool {
	return rule.Anyone || rule.Everyone || slices.ContainsFunc(c.Grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) })
}

// MayCallFor reports whether the caller may call a method for a Cluster.
func (c Caller) MayCallFor(rule Rule, cluster types.NamespacedName) bool {
	return slices.ContainsFunc(c.Grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) && g.covers(cluster) })
}

// OnlyCluster returns the Cluster that a call is for whose request names none: the only one that
// the caller was granted one of the rule's roles for. The error reports that there is none, or more
// than one; a pattern may match more than one.
func (c Caller) OnlyCluster(rule Rule) (types.NamespacedName, error) {
	var only types.NamespacedName
	for _, g := range c.Grants {
		if !slices.Contains(rule.Roles, g.Role) {
			continue
		}
		for _, cluster := range g.Clusters {
			if only != (types.NamespacedName{}) && only != cluster {
				return types.NamespacedName{}, fmt.Errorf("the requests of this method name no Cluster, and this identity has the role for "+
					"several, including %s and %s; grant it the role for exactly one", only, cluster)
			}
			only = cluster
		}
		if g.AllClusters || strings.Contains(only.String(), "*") {
			return types.NamespacedName{}, errors.New("the requests of this method name no Cluster, and this identity has the role for " +
				"any number of them; grant it the role for exactly one, by its name")
		}
	}
	if only == (types.NamespacedName{}) {
		return only, errors.New("this identity may not call this method")
	}
	return only, nil
}

// MaySeeAll reports whether the caller may call a method for every Cluster, and may therefore learn
// which Clusters do not exist.
func (c Caller) MaySeeAll(rule Rule) bool {
	return slices.ContainsFunc(c.Grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) && g.AllClusters })
}

// Roles returns the caller's roles, without duplicates.
func (c Caller) Roles() []string {
	var roles []string
	for _, g := range c.Grants {
		if !slices.Contains(roles, string(g.Role)) {
			roles = append(roles, string(g.Role))
		}
	}
	return roles
}

// Clusters returns the Clusters named by the caller's grants, with patterns unresolved. If a grant
// covers all Clusters, it returns nil and true.
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

// Authorizer derives callers from certificates. It is safe for concurrent use.
type Authorizer struct {
	trustDomain spiffeid.TrustDomain
	policy      func() *Policy
	clock       clock.PassiveClock
}

// New returns an authorizer for the identities of a trust domain. The function policy returns the
// policy in force, or nil if there is none.
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

// UnnamedError reports why a client certificate names no identity of the trust domain. Its holder
// may call what anyone may call; see [Rule]. Every other error of [Authorizer.FromChains] means
// that the certificate must not be used, or not any more.
type UnnamedError struct{ error }

func (e *UnnamedError) Unwrap() error { return e.error }

// FromChains returns the caller that a client certificate belongs to. The chains are those that
// verified the certificate: there is at least one, and each begins with the certificate. An error
// reports why the identity cannot be used, or can no longer be used: the handshake may be long
// past. It is an [*UnnamedError] if there is none.
func (a *Authorizer) FromChains(chains [][]*x509.Certificate) (Caller, error) {
	policy := a.policy()
	id, err := a.nameOf(chains[0][0])
	if err != nil {
		// Its serial number or its authority may be denied all the same.
		if denied := policy.checkDenied(spiffeid.ID{}, chains); denied != nil {
			return Caller{}, denied
		}
		return Caller{}, &UnnamedError{err}
	}
	if until := ValidUntil(chains); a.clock.Now().After(until) {
		return Caller{}, fmt.Errorf("the client certificate has expired at %s", until.UTC().Format(time.RFC3339))
	}
	id, own, err := splitOnboarding(id)
	if err != nil {
		return Caller{}, err
	}
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

// nameOf returns the SPIFFE ID in a client certificate. The error reports that there is none of the
// trust domain.
func (a *Authorizer) nameOf(certificate *x509.Certificate) (spiffeid.ID, error) {
	if len(certificate.URIs) != 1 {
		return spiffeid.ID{}, fmt.Errorf("the client certificate has %d URI names; exactly one, a SPIFFE id, is needed", len(certificate.URIs))
	}
	id, err := spiffeid.FromURI(certificate.URIs[0])
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("the client certificate's URI is not a SPIFFE id: %w", err)
	}
	if !id.MemberOf(a.trustDomain) {
		return spiffeid.ID{}, fmt.Errorf("the client certificate's trust domain is %q, not %q", id.TrustDomain().Name(), a.trustDomain.Name())
	}
	return id, nil
}

// NameIn returns the SPIFFE ID in a client certificate, without the onboarding, or "" if there is
// none. It is what the certificate's authority states, whether or not it can be used: the
// certificate may be denied, expired or of another trust domain. The chains are those that verified
// it.
func NameIn(chains [][]*x509.Certificate) string {
	if len(chains) == 0 || len(chains[0]) == 0 || len(chains[0][0].URIs) != 1 {
		return ""
	}
	id, err := spiffeid.FromURI(chains[0][0].URIs[0])
	if err != nil {
		return ""
	}
	if bare, _, err := splitOnboarding(id); err == nil {
		id = bare
	}
	return id.String()
}

// ValidUntil returns when the last of the verified chains expires. A chain expires with the first
// of its certificates.
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

// lists reports whether the Cluster's own identity is granted its role.
func (p *Policy) lists(cluster types.NamespacedName) bool {
	return p == nil || p.clusters == nil || among(p.clusters, cluster)
}

// These are the first path segments of the identities that Clusters own.
const (
	clusterPath   = "cluster"
	bootstrapPath = "bootstrap"
)

// ownIdentity is the parsed identity of a Cluster.
type ownIdentity struct {
	Onboarding

	role Role
}

// splitOnboarding returns an identity without its onboarding, as policies and limits use it. If the
// identity is a Cluster's own, its parsed form is returned too, and nil otherwise:
//
//	/cluster/<namespace>/<name>[/<onboarding>]
//	/bootstrap/<namespace>/<name>/<onboarding>
func splitOnboarding(id spiffeid.ID) (spiffeid.ID, *ownIdentity, error) {
	parts := strings.Split(strings.TrimPrefix(id.Path(), "/"), "/")
	role := map[string]Role{clusterPath: RoleCluster, bootstrapPath: RoleBootstrap}[parts[0]]
	switch {
	case role == RoleCluster && len(parts) == 3:
		return id, &ownIdentity{Onboarding{Cluster: types.NamespacedName{Namespace: parts[1], Name: parts[2]}}, role}, nil
	case role != "" && len(parts) == 4 && parts[3] == v1alpha1.Offboarded:
		// The label of a Cluster that was offboarded has this value, which no certificate may
		// match.
		return id, nil, fmt.Errorf("the client certificate's URI has the onboarding %q, which is reserved for no onboarding", v1alpha1.Offboarded)
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

// clusterOf returns the Cluster that an identity, without its onboarding, belongs to. It is false
// if the identity is not a Cluster's own.
func clusterOf(id spiffeid.ID) (types.NamespacedName, bool) {
	parts := strings.Split(strings.TrimPrefix(id.Path(), "/"), "/")
	if len(parts) != 3 || parts[0] != clusterPath && parts[0] != bootstrapPath {
		return types.NamespacedName{}, false
	}
	return types.NamespacedName{Namespace: parts[1], Name: parts[2]}, true
}

// ClusterIdentity returns the identity of a Cluster for an onboarding.
func ClusterIdentity(trustDomain string, of Onboarding) (spiffeid.ID, error) {
	return ownID(trustDomain, clusterPath, of)
}

// BootstrapIdentity returns the identity with which a shim requests its first certificate of an
// onboarding.
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
