package authz

import (
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// policyDenial denies the certificates that match all of its fields that are set.
type policyDenial struct {
	// ID is a SPIFFE ID.
	ID string `json:"id,omitempty"`
	// Serial is the serial number of a certificate in hexadecimal digits, with or without colons
	// between the bytes.
	Serial string `json:"serial,omitempty"`
	// Issuer is the fingerprint of an authority that signed the certificate, directly or
	// indirectly.
	Issuer string `json:"issuer,omitempty"`
	// IssuedBefore denies certificates whose validity begins earlier. It has a resolution of one
	// second.
	IssuedBefore *time.Time `json:"issuedBefore,omitempty"`
}

type denial struct {
	id           string
	serial       *big.Int
	issuer       *fingerprint
	issuedBefore time.Time
}

func parseDenials(file []policyDenial, trustDomain string) ([]denial, error) {
	var (
		denials []denial
		errs    []error
	)
	for n, entry := range file {
		wrong := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("deny[%d]: %s", n, fmt.Sprintf(format, args...)))
		}
		d := denial{id: entry.ID}
		if entry.ID != "" {
			if err := checkID(entry.ID, trustDomain); err != nil {
				wrong("id %q %v", entry.ID, err)
			}
		}
		if entry.Serial != "" {
			bytes, err := hex.DecodeString(evenDigits(entry.Serial))
			if err != nil {
				wrong("serial %q is not a hexadecimal number; `openssl x509 -in tls.crt -noout -serial` shows one", entry.Serial)
			}
			d.serial = new(big.Int).SetBytes(bytes)
		}
		if entry.Issuer != "" {
			f, err := parseFingerprint(entry.Issuer)
			if err != nil {
				wrong("issuer: %v", err)
			}
			d.issuer = &f
		}
		if entry.IssuedBefore != nil {
			d.issuedBefore = *entry.IssuedBefore
		}
		if d.id == "" && d.serial == nil && d.issuer == nil && d.issuedBefore.IsZero() {
			wrong("it names nothing: write an id, a serial, an issuer or issuedBefore")
		}
		denials = append(denials, d)
	}
	return denials, errors.Join(errs...)
}

// evenDigits returns the digits of a serial number, padded to whole bytes. openssl prints whole
// bytes; users may omit a leading zero.
func evenDigits(text string) string {
	digits := strings.ReplaceAll(text, ":", "")
	if len(digits)%2 == 1 {
		digits = "0" + digits
	}
	return digits
}

var errDenied = errors.New("the policy denies the client certificate")

// checkDenied returns an error if the policy denies the certificate, which is the first of each of
// the verified chains. A denied issuer denies everything it signed, even if another chain avoids
// it.
func (p *Policy) checkDenied(id spiffeid.ID, chains [][]*x509.Certificate) error {
	if p == nil {
		return nil
	}
	certificate := chains[0][0]
	for _, d := range p.denials {
		if (d.id == "" || d.id == id.String()) &&
			(d.serial == nil || certificate.SerialNumber != nil && d.serial.Cmp(certificate.SerialNumber) == 0) &&
			(d.issuer == nil || signedBy(*d.issuer, chains)) &&
			(d.issuedBefore.IsZero() || certificate.NotBefore.Before(d.issuedBefore)) {
			return errDenied
		}
	}
	return nil
}

func signedBy(issuer fingerprint, chains [][]*x509.Certificate) bool {
	for _, chain := range chains {
		for _, certificate := range chain[1:] {
			if fingerprintOf(certificate) == issuer {
				return true
			}
		}
	}
	return false
}
