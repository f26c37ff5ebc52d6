package authz

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"k8s.io/apimachinery/pkg/types"
)

// fingerprint is the SHA-256 hash of a certificate.
type fingerprint [sha256.Size]byte

func fingerprintOf(certificate *x509.Certificate) fingerprint { return sha256.Sum256(certificate.Raw) }

// parseFingerprint parses hexadecimal digits, with or without colons between the bytes.
func parseFingerprint(text string) (fingerprint, error) {
	var f fingerprint
	data, err := hex.DecodeString(strings.ReplaceAll(text, ":", ""))
	if err != nil || len(data) != len(f) {
		return f, fmt.Errorf("fingerprint %q is not the SHA-256 of a certificate, 64 hexadecimal digits", text)
	}
	copy(f[:], data)
	return f, nil
}

type policyIssuer struct {
	// Fingerprints are those of the certificates of intermediate or root authorities.
	Fingerprints []string `json:"fingerprints"`
	// Clusters are those whose own identities the authorities may sign, as <namespace>/<name>,
	// where `*` matches any characters.
	Clusters []string `json:"clusters,omitempty"`
	// Identities are further SPIFFE IDs that the authorities may sign.
	Identities []string `json:"identities,omitempty"`
	// AllIdentities allows every identity.
	AllIdentities bool `json:"allIdentities,omitempty"`
}

// issuer holds the identities that a certificate authority may sign.
type issuer struct {
	all        bool
	clusters   []types.NamespacedName
	identities []string
}

func (i *issuer) maySign(id spiffeid.ID) bool {
	cluster, is := clusterOf(id)
	return i.all || is && among(i.clusters, cluster) || slices.Contains(i.identities, id.String())
}

func parseIssuers(file []policyIssuer, trustDomain string) (map[fingerprint]*issuer, error) {
	issuers := map[fingerprint]*issuer{}
	var errs []error
	for n, entry := range file {
		wrong := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("issuers[%d]: %s", n, fmt.Sprintf(format, args...)))
		}
		bound := &issuer{all: entry.AllIdentities, clusters: parseClusters(entry.Clusters, wrong), identities: entry.Identities}
		for _, id := range entry.Identities {
			if err := checkID(id, trustDomain); err != nil {
				wrong("identity %q %v", id, err)
			}
		}
		switch named := len(entry.Clusters) + len(entry.Identities); {
		case entry.AllIdentities && named > 0:
			wrong("allIdentities excludes clusters and identities")
		case !entry.AllIdentities && named == 0:
			wrong("it has neither clusters nor identities nor allIdentities")
		}
		if len(entry.Fingerprints) == 0 {
			wrong("it has no fingerprints; `openssl x509 -in ca.crt -noout -fingerprint -sha256` shows one")
		}
		for _, text := range entry.Fingerprints {
			f, err := parseFingerprint(text)
			if err != nil {
				wrong("%v", err)
				continue
			}
			if _, known := issuers[f]; known {
				wrong("fingerprint %q appears twice; list everything that it may sign in one entry", text)
			}
			issuers[f] = bound
		}
	}
	return issuers, errors.Join(errs...)
}

// errNotBound does not reveal what the issuer may sign.
var errNotBound = errors.New("the policy does not let the issuer of the client certificate sign this identity")

// checkIssuer returns an error unless the issuers in the verified chains may sign the identity. At
// least one of them must be named by the policy, and all that are named must be allowed to sign it.
// An intermediate authority can thus be restricted although its root is not, and a new or renewed
// authority signs nothing until the policy names it.
func (p *Policy) checkIssuer(id spiffeid.ID, chains [][]*x509.Certificate) error {
	if p == nil || len(p.issuers) == 0 {
		return nil
	}
	named := false
	for _, chain := range chains {
		for _, certificate := range chain[1:] {
			bound, known := p.issuers[fingerprintOf(certificate)]
			if known && !bound.maySign(id) {
				return errNotBound
			}
			named = named || known
		}
	}
	if !named {
		return errNotBound
	}
	return nil
}
