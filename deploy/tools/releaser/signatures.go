package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/sigstore/sigstore/pkg/signature/payload"
)

// signingKey returns the key in the environment: RELEASE_KEY is an ECDSA key on the curve P-256, in
// PEM as openssl writes it, or the name of a file with one. It returns nil if there is none.
func signingKey() (*ecdsa.PrivateKey, error) {
	value := os.Getenv("RELEASE_KEY")
	if value == "" {
		return nil, nil
	}
	content := []byte(value)
	if !strings.Contains(value, "-----BEGIN") {
		var err error
		if content, err = os.ReadFile(value); err != nil {
			return nil, fmt.Errorf("reading RELEASE_KEY: %w", err)
		}
	}
	for block, rest := pem.Decode(content); block != nil; block, rest = pem.Decode(rest) {
		var key any
		var err error
		switch block.Type {
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		case "PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		default: // openssl writes the curve's parameters before the key
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading RELEASE_KEY: %w", err)
		}
		if ec, ok := key.(*ecdsa.PrivateKey); ok && ec.Curve == elliptic.P256() {
			return ec, nil
		}
		return nil, errors.New("RELEASE_KEY is not an ECDSA key on the curve P-256")
	}
	return nil, errors.New("RELEASE_KEY contains no unencrypted private key in PEM")
}

// sign returns the signature of a message in base64, as openssl and cosign verify it: ECDSA over
// the message's SHA-256, in ASN.1.
func sign(key *ecdsa.PrivateKey, message []byte) (string, error) {
	sum := sha256.Sum256(message)
	signature, err := key.Sign(rand.Reader, sum[:], crypto.SHA256)
	return base64.StdEncoding.EncodeToString(signature), err
}

// signed reports whether a signature of sign is the key's signature of the message.
func signed(key *ecdsa.PublicKey, message []byte, signature string) bool {
	decoded, err := base64.StdEncoding.DecodeString(signature)
	sum := sha256.Sum256(message)
	return err == nil && ecdsa.VerifyASN1(key, sum[:], decoded)
}

const (
	// payloadType and signatureAnnotation are cosign's, as its specification of signatures defines.
	payloadType         = "application/vnd.dev.cosign.simplesigning.v1+json"
	signatureAnnotation = "dev.cosignproject.cosign/signature"
)

// signPushed signs an image or a chart in a registry in cosign's format: its signatures are layers of
// an image beside it, whose tag is made from the digest. It keeps the signatures of other keys, and
// does nothing if there is one of this key.
func signPushed(key *ecdsa.PrivateKey, pushed name.Digest, access []remote.Option) error {
	content, err := json.Marshal(payload.Cosign{Image: pushed})
	if err != nil {
		return err
	}
	tag := pushed.Context().Tag(strings.ReplaceAll(pushed.DigestStr(), ":", "-") + ".sig")
	signatures, err := remote.Image(tag, access...)
	if isNotFound(err) {
		signatures, err = mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), nil
	}
	if err != nil {
		return err
	}
	manifest, err := signatures.Manifest()
	if err != nil {
		return err
	}
	for _, layer := range manifest.Layers {
		if signed(&key.PublicKey, content, layer.Annotations[signatureAnnotation]) {
			fmt.Printf("signed already: %s\n", pushed)
			return nil
		}
	}
	signature, err := sign(key, content)
	if err != nil {
		return err
	}
	signatures, err = mutate.Append(signatures, mutate.Addendum{
		Layer: static.NewLayer(content, payloadType), Annotations: map[string]string{signatureAnnotation: signature},
	})
	if err != nil {
		return err
	}
	if err := remote.Write(tag, signatures, access...); err != nil {
		return err
	}
	fmt.Printf("signed: %s\n", pushed)
	return nil
}
